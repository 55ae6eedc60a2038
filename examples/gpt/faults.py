"""Faults that are planned for the run: checked at once, then handed to the members."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from gpt.timeline import RETURNED, read_events

VARIABLE = "NTP_FAULTS"
"""Environment variable in which the members look for their faults."""


def check_faults(text: str, degrees: Sequence[int], max_steps: int) -> None:
    """Refuse faults that the run cannot have: nobody would know why they never happened.

    Raises:
        ValueError: names the fault.
    """
    plan = _read(text)
    plan.check(degrees)
    for fault in plan:
        if fault.step >= max_steps:
            raise ValueError(
                f"--fault: {str(fault)!r} never happens, as the run has {max_steps} steps: name an earlier step, or "
                f"give --max_steps {fault.step + 1} or more"
            )


def plan_faults(text: str) -> None:
    """Let the members of the job that this process starts, or is one of, have these faults."""
    if text:
        os.environ[VARIABLE] = text


def missing_returns(text: str, run: Path) -> list[str]:
    """Places that were to return, and of which nobody has returned by the timeline in the run's folder."""
    events = [event.removeprefix(RETURNED) for event in read_events(run) if event.startswith(RETURNED)]
    seats = [seat for event in events for seat in event.split()]
    places = [str(fault).split()[1].partition("@")[0] for fault in _read(text).returns()]
    # A place is a seat, such as r1.s2, or a replica, such as r1.
    return [place for place in places if not any(place in (seat, seat.partition(".")[0]) for seat in seats)]


class WaitForReturns(Callback):
    """Pauses before each step while a process that was asked to come back starts.

    Only for machines where many members share few CPU cores: without, it would get so little of them that it is not
    ready before a short run ends. On GPUs nobody has to wait.

    Args:
        text: The planned faults.
        seconds: Length of a pause.
        paused: Called with the length of each pause.
    """

    def __init__(self, text: str, seconds: float, paused: Callable[[float], None]) -> None:
        self.seconds = seconds
        self._paused = paused
        self._waiting = list(_read(text).returns())

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        members = trainer.strategy.topology.members
        self._waiting = [
            fault
            for fault in self._waiting
            if fault.step >= trainer.global_step or not any(fault.covers(seat) for seat in members)
        ]
        if any(fault.step < trainer.global_step for fault in self._waiting):
            time.sleep(self.seconds)
            self._paused(self.seconds)


def _read(text: str) -> Any:
    """The plan in ``text``. Imported here so that a dense run needs Lightning alone."""
    from lightning_ntp import FaultPlan

    return FaultPlan.parse(text, "--fault")
