"""``GoodputMonitor``: where a run's time went, in the loggers and the progress bar."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_ntp.engine.events import FailureEvent, ViewEvent
from lightning_ntp.goodput import Ledger, Tally


class GoodputMonitor(Callback):
    """Logs, with every step that is logged, the names of :mod:`lightning_ntp.goodput`.

    Besides, for every replica ``r`` that the job was founded with, ``ntp/r{r}/degree`` and ``ntp/r{r}/share``. Every
    member keeps the ledger, so that the next leader goes on with it; only the leader's is logged. Checkpoints carry it:
    a run that goes on from one goes on with its sums. Works with any strategy; failures are known with ours.

    Args:
        prog_bar: Whether the progress bar shows the goodput.
        clock: Seconds that do not go back.

    Attributes:
        ledger: Of this run.
    """

    def __init__(self, prog_bar: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._prog_bar, self._clock = prog_bar, clock
        self.ledger = Ledger(clock())
        self._steps = 0
        self._is_in_step = False

    def state_dict(self) -> dict[str, Any]:
        return self.ledger.tally.to_json()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before = Tally.from_json(state_dict)
        before.add(self.ledger.tally)
        self.ledger.tally = before

    # Around the steps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._is_in_step:
            self._is_in_step = True
            self.ledger.begin_step(self._clock())
        else:
            self.ledger.enter("productive", self._clock())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step > self._steps:
            self._steps, self._is_in_step = trainer.global_step, False
            samples, capacity = _work_of(trainer)
            self.ledger.commit_step(self._clock(), samples, capacity)
            self._log(trainer, pl_module)
        self.ledger.enter("data_loading", self._clock())

    def _log(self, trainer: Trainer, module: LightningModule) -> None:
        metrics = {**self.ledger.tally.metrics(), **_replicas_of(trainer)}
        goodput = metrics.pop("goodput")
        options: dict[str, Any] = {"on_step": True, "on_epoch": False, "batch_size": 1}
        module.log("goodput", goodput, prog_bar=self._prog_bar, **options)
        module.log_dict(metrics, **options)

    # What else time goes to

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.ledger.enter("other", self._clock())

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._turn_to_other()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._turn_to_other()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._turn_to_other()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.ledger.enter("checkpoint_save", self._clock())  # until the next thing is heard of

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.ledger.enter("checkpoint_restore", self._clock())

    def _turn_to_other(self) -> None:
        if self.ledger.bucket != "initialization":  # the sanity check belongs to the start
            self.ledger.enter("other", self._clock())

    # Failures

    def on_ntp_failure(self, trainer: Trainer, pl_module: LightningModule, event: FailureEvent) -> None:
        self.ledger.fail(self._clock())

    def on_ntp_recovered(self, trainer: Trainer, pl_module: LightningModule, event: ViewEvent) -> None:
        self._go_on()

    def on_ntp_rejoin(self, trainer: Trainer, pl_module: LightningModule, event: ViewEvent) -> None:
        self._go_on()

    def _go_on(self) -> None:
        """A view is entered: a step that is under way begins again, or has only just begun."""
        if self._is_in_step:
            self.ledger.begin_step(self._clock())
        else:
            self.ledger.enter("other", self._clock())


def _work_of(trainer: Trainer) -> tuple[int, float]:
    """Samples of the step that was just taken, and which part of the founding members took it."""
    counted = getattr(trainer.strategy, "work_in_step", None)
    return (0, 1.0) if counted is None else counted()


def _replicas_of(trainer: Trainer) -> dict[str, float]:
    replicas = getattr(trainer.strategy, "replicas", None)
    if replicas is None:
        return {}
    named = ((f"ntp/r{number}", replica) for number, replica in replicas().items())
    return {f"{name}/{key}": float(value) for name, pair in named for key, value in zip(_KEYS, pair, strict=True)}


_KEYS = ("degree", "share")
