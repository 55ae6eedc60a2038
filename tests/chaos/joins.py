"""Lets a joiner in at a step that a test has chosen."""

from __future__ import annotations

import time

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_ntp.strategies import process


class WaitForJoiner(Callback):
    """In step ``step``, behind planned returns, all wait until somebody asks to join: it is let in at the next step.

    Plan the return for that step: a process that is admitted before it would be waited for in vain.
    """

    def __init__(self, step: int, limit_s: float = 20.0) -> None:
        self._step, self._limit_s = step, limit_s

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        process.ProcessMember.current.before_step.append(self._wait)

    def _wait(self, step: int) -> None:
        survivor = process.ProcessMember.current
        if survivor.is_alone or step != self._step:
            return
        until = time.monotonic() + self._limit_s
        while not survivor.membership.joiner_waits and time.monotonic() < until:
            time.sleep(0.01)


def waiting_for_joiner(*steps: int, limit_s: float = 20.0) -> list[Callback]:
    """Callbacks of a run in which somebody is let in after each of ``steps``."""
    return [WaitForJoiner(step, limit_s) for step in steps]
