"""Runs plans in a zygote and judges them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.chaos.judge import Verdict, judge, judge_shrinking, summary
from tests.chaos.parity import Dense
from tests.chaos.plan import Plan, make_plan, scenario_of
from tests.lightning.survive_runs import run_job
from tests.support.zygote import Zygote


class Runner:
    """Runs plans one after the other.

    Args:
        zygote: Forks each run's launcher.
        logs: Journals and messages of every run are kept here, one folder a run; deleted if not given.
    """

    def __init__(self, zygote: Zygote, logs: Path | None = None) -> None:
        self._zygote, self._logs = zygote, logs
        self._dense: dict[tuple[tuple[int, ...], int], Dense] = {}

    def run(self, plan: Plan) -> Verdict:
        folder = None
        if self._logs is not None:
            folder = self._logs / plan.name.replace("--", "").replace(" ", "-")
            folder.mkdir(parents=True)
        trial = plan.trial
        (outcome,) = self._zygote.run(run_job, 1, trial, timeout_s=trial.limit_s + 30, cwd=folder)
        text = f"{plan.name}: {plan}"
        if plan.shrinks:
            verdict = judge_shrinking(text, outcome, plan.scenario)
        else:
            verdict = judge(text, outcome, self._dense_of(plan))
        if verdict.problems:
            verdict.notes.append(f"\n{outcome.written}")
        return verdict

    def _dense_of(self, plan: Plan) -> Dense:
        """It depends on the training alone, so it is made once."""
        key = plan.degrees, plan.windows
        if key not in self._dense:
            self._dense[key] = Dense.of(scenario_of(*key))
        return self._dense[key]


def run_plans(
    zygote: Zygote, seed: int, numbers: Sequence[int], tell: Callable[[str], None], logs: Path | None = None
) -> bool:
    """Run, tell of each, and of all in a last line of JSON.

    Returns:
        Whether nothing was wrong.
    """
    runner, verdicts = Runner(zygote, logs), []
    for number in numbers:
        began = time.monotonic()
        verdicts.append(runner.run(make_plan(seed, number)))
        tell(f"{verdicts[-1]} [{time.monotonic() - began:.1f} s]")
    report = summary(verdicts)
    tell(json.dumps(report))
    return is_good(report)


def is_good(report: dict) -> bool:
    """Whether every run has recovered, or has told of a loss that is true."""
    bad = ("hangs", "wrong_weights", "samples_lost", "samples_doubled")
    return not any(report[name] for name in bad) and report["recovered"] + report["shards_lost"] == report["runs"]
