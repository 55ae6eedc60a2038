"""Several models and Trainers in one process, one after the other and one inside the other: nothing is shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lightning_ntp import NTPStrategy
from lightning_ntp.errors import ConfigError
from tests.lightning.runs import Language, loader, quiet_trainer
from tests.support.models import ModelConfig, loss_fn

FIRST = ModelConfig(num_kv_heads=2, layers=1)
SECOND = ModelConfig(width=24, num_heads=6, num_kv_heads=3, layers=1, tied=True)


class Evaluated(Language):
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test", loss_fn(self.model(batch[1]), batch[1]), sync_dist=True)


class Nested(Callback):
    """Trains another model by another Trainer before the second epoch and validates it in mid-epoch."""

    def __init__(self, fit: Any) -> None:
        self.fit, self.told = fit, []

    def on_train_epoch_start(self, trainer: Trainer, module: Language) -> None:
        if trainer.current_epoch == 1:
            self.told.append(self.fit())

    def on_train_batch_end(self, trainer: Trainer, module: Language, *args: Any) -> None:
        if trainer.global_step == 2:
            self.told.append(self.fit())


class Script:
    """A user's script with several fits; run on members and dense.

    Args:
        world_size: Members; 1 for dense.
        seed: Of the initial weights.
    """

    def __init__(self, world_size: int, seed: int) -> None:
        self.world_size, self.dense = world_size, world_size == 1
        self.first, self.second = Evaluated(FIRST, seed), Evaluated(SECOND, seed, optimizer="sgd")
        self.told: list[dict[str, float]] = []

    def trainer(self, shares: tuple[int, int] = (5, 3), **options: Any) -> Trainer:
        strategy = "auto" if self.dense else NTPStrategy(degrees=[2, 1], shares=list(shares))
        return quiet_trainer(self.world_size, strategy, **options)

    def fit(self, trainer: Trainer, module: Evaluated) -> None:
        trainer.fit(module, loader(26, 8 if self.dense else 4), loader(7, 4 if self.dense else 2))
        self.tell(trainer)

    def test(self, trainer: Trainer, module: Evaluated) -> None:
        trainer.test(module, loader(7, 4 if self.dense else 2), verbose=False)
        self.tell(trainer)

    def tell(self, trainer: Trainer) -> None:
        self.told.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def run(self) -> list[dict[str, float]]:
        one, two = self.trainer(gradient_clip_val=1.0), self.trainer(shares=(6, 2))
        self.fit(one, self.first)
        self.fit(two, self.second)
        self.test(one, self.first)
        self.test(one, self.second)
        one.fit_loop.max_epochs = 2
        self.fit(one, self.first)  # goes on with the first Trainer's own optimizer
        self.fit(self.trainer(), self.first)  # another Trainer and strategy, the same model
        self.test(self.trainer(), self.second)
        inner = Nested(lambda: self.fit(self.trainer(shares=(4, 4), gradient_clip_val=0.1), self.second))
        self.fit(self.trainer(max_epochs=2, gradient_clip_val=1.0, callbacks=[inner]), self.first)
        assert len(inner.told) == 2
        self.test(two, self.second)
        return self.told


def run_script(rank: int, world_size: int, store: str) -> tuple[list[dict[str, float]], str]:
    torch.set_default_dtype(torch.float64)
    script = Script(world_size, seed=rank)
    script.run()
    with pytest.raises(ConfigError) as refused:
        quiet_trainer(world_size, NTPStrategy(degrees=[1, 1, 1])).test(script.first, loader(7, 2), verbose=False)
    return script.told, str(refused.value)


def test_two_models_and_trainers(workers):
    results = workers.run(run_script, 3)
    torch.set_default_dtype(torch.float64)
    dense = Script(1, seed=0).run()
    for told, refused in results:
        for number, (ours, theirs) in enumerate(zip(told, dense, strict=True)):
            assert ours == pytest.approx(theirs, rel=1e-11), f"fit or test number {number}"
        assert "the model is sharded for slot" in refused and "build the model anew" in refused
