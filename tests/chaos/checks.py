"""Runs a job in a test's zygote and asserts what became of it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tests.chaos.parity import Dense, compare, saved_problems
from tests.chaos.table import Row
from tests.lightning.survive_runs import Outcome, Trial, run_job


def run_trial(workers: Any, trial: Trial, dead: Collection[str] = ()) -> Outcome:
    """Run it; exactly the last processes at the seats ``dead`` must have ended with anything but 0."""
    __tracebackhide__ = True
    (outcome,) = workers.run(run_job, 1, trial, timeout_s=trial.limit_s + 30)
    ended_ill = {seat for seat, code in outcome.codes.items() if code}
    assert ended_ill == set(dead), f"{outcome.codes}\n{outcome.written}"
    return outcome


def check_trial(workers: Any, trial: Trial, dead: Collection[str], dense: Dense) -> Outcome:
    """Besides, every step is the dense run's, every sample is in one step, checkpoints hold the dense weights."""
    __tracebackhide__ = True
    outcome = run_trial(workers, trial, dead)
    problems = compare(outcome.reports, dense)
    problems.wrong += saved_problems(outcome.saved, dense)
    assert not problems, f"{problems}\n{outcome.written}"
    return outcome


def check_row(workers: Any, row: Row, dense: Dense) -> None:
    """A row of the table."""
    __tracebackhide__ = True
    check_trial(workers, row.trial, row.dead, dense)
