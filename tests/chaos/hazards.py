"""Modules that do what users do around a step: log, reduce, count and catch in hooks."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torchmetrics import SumMetric

from tests.lightning.runs import is_ntp
from tests.lightning.survive_runs import Recorded
from tests.support.reference import make_optimizer

IS_JOINER = "NTP_INCARNATION"


def is_joiner() -> bool:
    return os.environ.get(IS_JOINER, "0") != "0"


class Noting(Recorded):
    """Collects notes in a list; outside the passes, which must be told alike."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.collected: list[Any] = []

    def on_fit_end(self) -> None:
        self.notes = self.collected


class LogsBeforeStep(Recorded):
    """Logs between the vote and the optimizer's step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("hook", torch.tensor(1.0), sync_dist=True)


class LogsBehindStep(Recorded):
    """Logs in ``optimizer_step``, behind the step."""

    def optimizer_step(self, *arguments: Any, **options: Any) -> None:
        super().optimizer_step(*arguments, **options)
        self.log("late", torch.tensor(1.0), sync_dist=True)


class SchedulesByHand(Noting):
    """Manual optimization that steps its scheduler and logs behind the optimizer's step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        scheduler.step()
        self.log("lr", scheduler.get_last_lr()[0], sync_dist=True)

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.collected.append(self.lr_schedulers().get_last_lr()[0])

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer("sgd", self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class GivesUp(Recorded):
    """Skips a batch when something goes wrong in its backward, as many users do."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        try:
            self.manual_backward(loss)
        except RuntimeError:
            return
        optimizer.step()


class Swallows(Recorded):
    """Goes on with validation whatever happens in it."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        try:
            return super().validation_step(batch, batch_idx)
        except Exception:
            return None


class Validates(Noting):
    """Notes after which steps it has validated."""

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.collected.append((self.current_epoch, self.trainer.global_step))


class Dealt(Noting):
    """Notes the shares of every batch."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        if is_ntp(self.trainer):
            self.collected.append((self.trainer.strategy.shares, self.trainer.strategy.degrees))


class Counts(Noting):
    """Updates a metric in a hook around the step, and another one in the step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.around, self.inside = SumMetric(), SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.inside.update(float(len(batch[0])))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.around.update(1.0)

    def on_train_epoch_end(self) -> None:
        self.collected = [float(self.around.compute()), float(self.inside.compute())]


class LogsFirst(Recorded):
    """Logs a value in the first batch of an epoch only."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0:
            self.log("first", torch.tensor(1.0), on_step=False, on_epoch=True, sync_dist=True)
        return super().training_step(batch, batch_idx)


class ReducesAtStart(Noting):
    """Reduces before the first step, when a joiner is alone with its collectives."""

    def on_fit_start(self) -> None:
        for op in ("mean", "sum"):
            self.collected.append(float(self.trainer.strategy.reduce(torch.tensor(3.0), reduce_op=op)))


class CannotJoin(Recorded):
    """Fails in a process that comes back."""

    def configure_optimizers(self) -> Any:
        if is_joiner():
            raise OSError("this node has no disk")
        return super().configure_optimizers()


class Terminated(Recorded):
    """Gets SIGTERM in its fifth batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)


class DiesHandingOver(Recorded):
    """r1.s2 dies in the hand-over of a replica that retires, to which r1.s0 comes late."""

    def on_fit_start(self) -> None:
        engine = self.trainer.strategy._engine
        self.seat = str(engine.membership.seat)

        def die(leaving: Any) -> None:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)

        if self.seat == "r1.s2":
            engine.hand_over = die

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.seat == "r1.s0" and batch_idx == 2:
            time.sleep(2.0)
