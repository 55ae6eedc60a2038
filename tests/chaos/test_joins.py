"""B6: who comes back is its peers' equal, bit by bit, and changes nothing for them."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest

from tests.chaos.checks import check_trial
from tests.chaos.copies import copy_problems
from tests.chaos.joins import waiting_for_joiner
from tests.chaos.parity import Dense
from tests.chaos.table import scenario_of
from tests.lightning.survive_runs import Outcome, Trial

WINDOWS = 8
CASE = replace(scenario_of((3, 3)), size=(WINDOWS - 1) * 12 + 4)
STEPS_AFTER = 5

# The last step of an epoch: admitted after validation and checkpoint. The one before: admitted before them.
MOMENTS = [*sorted(random.Random(6).sample(range(3, WINDOWS - 2), 3)), WINDOWS - 2, WINDOWS - 1]
SEATS = ["r1.s2", "r0.s1", "r1", "r0.s0", "r0.s0"]


@pytest.fixture(scope="module")
def dense() -> Dense:
    return Dense.of(CASE)


# Behind the marker all but the hardest two: a whole replica, and rank 0 between an epoch's end and the next epoch.
RETURNS = [
    pytest.param(seat, step, marks=() if seat == "r1" or step == WINDOWS - 1 else pytest.mark.slow)
    for seat, step in zip(SEATS, MOMENTS, strict=True)
]


@pytest.mark.parametrize(("seat", "step"), RETURNS)
def test_a_return(workers, dense, seat, step):
    faults = f"kill {seat}@1:{'vote' if step % 2 else 'backward'}, return {seat}@{step}"
    # A whole replica comes back at once, with as many as it needs.
    case = replace(CASE, strategy={"min_tensor_parallel_size": 3 if seat == "r1" else 1})
    trial = Trial(case, faults, checkpoints=True, states=True, callbacks=partial(waiting_for_joiner, step))
    outcome = check_trial(workers, trial, (), dense)
    joiners = [name for name, report in outcome.reports.items() if report.is_joiner]
    assert len(joiners) == (3 if seat == "r1" else 1)
    for name in joiners:
        check_joiner(outcome, name, step)
    for report in outcome.reports.values():
        if not report.is_joiner:
            assert not report.loads, f"{report.name} has loaded state: {report.loads}"
    leaders = [name for name, report in outcome.reports.items() if report.summary and report.summary.leader]
    assert leaders == ["r0.s1.0" if seat == "r0.s0" else "r0.s0.0"]


def check_joiner(outcome: Outcome, name: str, asked_in: int) -> None:
    report = outcome.reports[name]
    assert sorted(report.steps) == list(range(asked_in + 1, 2 * WINDOWS)), "the steps that it has taken"
    assert len(report.steps) >= STEPS_AFTER
    for step in sorted(report.steps)[:STEPS_AFTER]:
        peers = [other for other in outcome.reports.values() if step in other.steps]
        assert len(peers) == 6
        assert report.steps[step].states and report.steps[step].scalars
        assert not copy_problems(outcome.reports, step)
    assert report.summary.global_step == 2 * WINDOWS
