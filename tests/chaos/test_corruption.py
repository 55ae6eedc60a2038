"""Silent corruption, through the Trainer: a bit that flips is seen, told to callbacks, and its member leaves."""

from __future__ import annotations

from dataclasses import replace

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_ntp.engine.events import CorruptionEvent
from lightning_ntp.membership.exits import ExitCode
from tests.chaos.checks import check_trial
from tests.chaos.parity import Dense
from tests.chaos.test_leaving import CASE
from tests.lightning.survive_runs import Trial


class Alarm(Callback):
    """Leaves what it was told in the module's notes."""

    def on_ntp_corruption(self, trainer: Trainer, module: LightningModule, event: CorruptionEvent) -> None:
        module.notes = [*(module.notes or ()), event]


def alarms() -> list[Callback]:
    return [Alarm()]


def test_the_deviating_member_of_three_replicas_is_told_and_leaves(workers):
    """The flipped bit is the lowest of a 64-bit weight, so the run is still the dense one to the tolerance."""
    case = replace(CASE, degrees=(2, 2, 2), batch_size=1, strategy={"verify_every_n_steps": 1})
    trial = Trial(case, "flip r1.s1@3:forward", callbacks=alarms)
    outcome = check_trial(workers, trial, {"r1.s1"}, Dense.of(case))
    assert outcome.codes["r1.s1"] == ExitCode.DRAINED
    for name, report in outcome.reports.items():
        if name != "r1.s1.0":
            (event,) = report.summary.notes
            assert event.is_certain and list(map(str, event.seats)) == ["r1.s1"] and 3 <= event.step < 3 + 8
