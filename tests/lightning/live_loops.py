"""Scripts for members that die: loops without a fit, with several optimizers, with several Trainers."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from lightning_ntp import NTPStrategy
from tests.lightning.live_fit import await_return, whoami
from tests.lightning.runs import SMALL, Language, loader, quiet_trainer
from tests.support.job import TIMEOUTS
from tests.support.models import loss_fn

Degrees = tuple[int, ...]


def make_trainer(degrees: Degrees, **options: Any) -> Trainer:
    """On replicas of these degrees; dense in this process where there are none."""
    if not degrees:
        return quiet_trainer(1, "auto", **options)
    strategy = NTPStrategy(
        degrees=list(degrees), timeouts=TIMEOUTS, bucket_cap_mb=0.02, min_tensor_parallel_size=1
    )
    return quiet_trainer(sum(degrees), strategy, **options)


def batch_size(degrees: Degrees) -> int:
    """Global batches of eight."""
    return 8 // max(1, len(degrees))


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """The dense weights, on the leader; nothing on other members."""
    return {name: value.clone() for name, value in trainer.strategy.lightning_module_state_dict().items()}


class Evaluated(Language):
    """Tells how many steps it has run, so that a member may die in one."""

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", loss_fn(self.model(batch[1]), batch[1]), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> list[tuple[int, Tensor]]:
        return list(zip(batch[0].tolist(), self.model(batch[1])[:, -1], strict=True))


def evaluate(degrees: Degrees, stage: str) -> Any:
    """``validate``, ``test`` or ``predict`` alone, twice: with another Trainer the second time."""
    torch.set_default_dtype(torch.float64)
    module, told = Evaluated(SMALL, seed=0), []
    for _ in range(2):
        trainer = make_trainer(degrees)
        data = loader(30, batch_size(degrees))
        if stage == "predict":
            told.append(dict(entry for batch in trainer.predict(module, data) for entry in batch))
        else:
            told.append(getattr(trainer, stage)(module, data, verbose=False)[0])
    return told


class Points(LightningModule):
    """A generator and a discriminator of points on a line, in turn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.make = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 2))
        self.judge = nn.Sequential(nn.Linear(2, 24), nn.ReLU(), nn.Linear(24, 1))
        self.ntp_plan = {name: style for part in ("make", "judge") for name, style in _plan(part).items()}
        self.steps: list[tuple[float, float]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        noise, real = batch
        makes, judges = self.optimizers()
        self.toggle_optimizer(makes)
        made = mse_loss(self.judge(self.make(noise)), torch.ones(len(noise), 1))
        self._step(makes, made)
        self.toggle_optimizer(judges)
        with torch.no_grad():
            fakes = self.make(noise)
        wrong = mse_loss(self.judge(real), torch.ones(len(real), 1)) + mse_loss(
            self.judge(fakes), torch.zeros(len(fakes), 1)
        )
        self._step(judges, wrong)
        assert all(parameter.requires_grad for parameter in self.parameters())
        self.log("made", made, sync_dist=True)
        self.steps.append((made.item(), wrong.item()))

    def _step(self, optimizer: Any, loss: Tensor) -> None:
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in (self.make, self.judge)]


def _plan(part: str) -> dict[str, str]:
    return {f"{part}.0": "colwise", f"{part}.2": "rowwise"}


def pairs(size: int, batch_size: int) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    noise, along = torch.randn(size, 4, generator=generator), torch.randn(size, 1, generator=generator)
    return DataLoader(list(zip(noise, torch.cat((along, 2 * along), 1), strict=True)), batch_size=batch_size)


def adversaries(degrees: Degrees) -> tuple[int, dict[str, Tensor]]:
    """Steps of both optimizers, and the weights."""
    torch.set_default_dtype(torch.float64)
    module, trainer = Points(), make_trainer(degrees)
    trainer.fit(module, pairs(64, batch_size(degrees)))
    return trainer.global_step, state_of(trainer)


def several(degrees: Degrees) -> list[Any]:
    """Fit, evaluate with a new Trainer, fit another model, fit the first one on."""
    torch.set_default_dtype(torch.float64)
    first, second, told = Language(SMALL, seed=0), Language(SMALL, seed=1), []
    for module, max_epochs in ((first, 1), (second, 1), (first, 2)):
        trainer = make_trainer(degrees, max_epochs=max_epochs)
        trainer.fit(module, loader(32, batch_size(degrees)), loader(7, batch_size(degrees)))
        told.append((trainer.global_step, state_of(trainer)))
        [metrics] = make_trainer(degrees).validate(module, loader(9, batch_size(degrees)), verbose=False)
        told.append(metrics["val_loss"])
    return told


def after_the_fit(degrees: Degrees, victim: str, saves: bool) -> dict[str, Any]:
    """One member dies behind its fit, before the others save, or while they end."""
    torch.set_default_dtype(torch.float64)
    module, trainer = Language(SMALL, seed=0), make_trainer(degrees)
    trainer.fit(module, loader(32, batch_size(degrees)))
    if whoami() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if not saves:
        return {}
    trainer.save_checkpoint("end.ckpt")
    return state_of(trainer)


def low_precision(degrees: Degrees) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of a fit in bf16-mixed."""
    module, trainer = Language(SMALL, seed=0), make_trainer(degrees, precision="bf16-mixed", max_epochs=2)
    trainer.fit(module, loader(32, batch_size(degrees)))
    parts = {part.name: part.parameter.detach().clone() for part in module._ntp_model.parameters()}
    replicated = {name: value for name, value in parts.items() if value.shape == _dense_shape(module, name)}
    return [entry.loss for entry in module.seen], replicated


class AwaitReturn(Callback):
    """Before a step all wait for a process that comes back.

    Args:
        step: Counted from 0.
        limit_s: No longer than that.
    """

    def __init__(self, step: int, limit_s: float = 30.0) -> None:
        self._step, self._limit_s = step, limit_s

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:
            await_return(trainer, self._limit_s)


def _dense_shape(module: Language, name: str) -> torch.Size:
    return next(torch.Size(part.dense_shape) for part in module._ntp_model.parameters() if part.name == name)
