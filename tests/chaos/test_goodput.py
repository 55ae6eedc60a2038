"""The goodput of a real training, through a death and a return: buckets sum to the wall time, all members agree."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_ntp import GoodputMonitor
from tests.chaos.checks import run_trial
from tests.chaos.joins import waiting_for_joiner
from tests.chaos.test_leaving import CASE
from tests.lightning.survive_runs import Trial


class Watch(Callback):
    """Leaves the ledger, and the time by another clock, in the module's notes."""

    def __init__(self, monitor: GoodputMonitor) -> None:
        self._monitor, self._began = monitor, time.monotonic()

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        module.notes = self._monitor.state_dict(), time.monotonic() - self._began, dict(trainer.logged_metrics)


def monitored(*steps: int) -> list[Callback]:
    monitor = GoodputMonitor()
    return [*waiting_for_joiner(*steps), monitor, Watch(monitor)]


def test_a_death_and_a_return(workers):
    case = replace(CASE, trainer={**CASE.trainer, "log_every_n_steps": 1})
    trial = Trial(case, "kill r1.s1@2:backward, return r1.s1@6", callbacks=partial(monitored, 6), checkpoints=True)
    outcome = run_trial(workers, trial)
    for name, report in outcome.reports.items():
        if report.summary is None:
            continue
        tally, wall_s, logged = report.summary.notes
        seconds = tally["seconds"]
        veteran = not report.is_joiner
        if veteran:
            assert sum(seconds.values()) == pytest.approx(wall_s, rel=1e-3)
        assert (tally["samples"], tally["steps"], tally["disruptions"]) == (case.size, 12, 1), name
        for bucket in ("productive", "initialization", "wasted_progress", "reduced_capacity", "reconfiguration"):
            assert seconds[bucket] > 0, bucket
        assert logged["goodput"] == pytest.approx(seconds["productive"] / sum(seconds.values()), rel=0.2)
        assert logged["disruptions"] == 1 and logged["time_to_recover"] > 0
        assert {key: logged[key] for key in logged if key.startswith("ntp/")} == {
            "ntp/r0/degree": 3, "ntp/r0/share": 6, "ntp/r1/degree": 3, "ntp/r1/share": 6
        }  # fmt: skip
