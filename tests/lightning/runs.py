"""A whole ``Trainer.fit`` in every rank of a zygote run, and what the tests want to know of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ntp import NTPStrategy
from tests.dist.bare import plan_for
from tests.support.batches import TokenDataset
from tests.support.models import ModelConfig, build, loss_fn, padded_loss_fn
from tests.support.reference import History, make_optimizer

Options = dict[str, Any]


class Language(LightningModule):
    """The test transformer as users write it; batches are (sample ids, tokens)."""

    def __init__(self, config: ModelConfig, seed: int = 0, optimizer: str = "adamw", padded: bool = False) -> None:
        super().__init__()
        self.model = build(config, seed, torch.get_default_dtype())
        self.optimizer_name, self.padded = optimizer, padded
        self.seen: list[tuple[list[int], float, float]] = []
        self.ntp_plan = plan_for(config).with_prefix("model")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        ids, tokens = batch
        if self.padded:
            labels = pad_labels(ids, tokens)
            loss, count = padded_loss_fn(self.model(tokens), labels)
            self.seen.append((ids.tolist(), loss.item(), count))
            return {"loss": loss, "weight": count}
        loss = loss_fn(self.model(tokens), tokens)
        self.seen.append((ids.tolist(), loss.item(), len(ids)))
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        _, tokens = batch
        self.log("val_loss", loss_fn(self.model(tokens), tokens), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.optimizer_name, self.parameters())


def pad_labels(ids: Tensor, tokens: Tensor) -> Tensor:
    """Labels of the padded batch that the dense reference uses, for tokens without padding."""
    from tests.support.batches import padded_batch

    return padded_batch(ids.tolist())[1]


class StepRecorder(Callback):
    """The dense weights after every optimizer step, on the leader, and the voted norms."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        self.norms.append(trainer.strategy._vote(optimizer).grad_norm)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if trainer.global_step > len(self.weights):
            state = trainer.strategy.lightning_module_state_dict()
            self.weights.append({name.removeprefix("model."): tensor.clone() for name, tensor in state.items()})


@dataclass
class FitResult:
    """What one rank saw."""

    seen: list[tuple[list[int], float, float]]
    dummies: list[bool]
    norms: list[float]
    weights: list[dict[str, Tensor]]
    metrics: dict[str, float]
    global_step: int
    extra: dict[str, Any] = field(default_factory=dict)


def loaders(size: int, batch_size: int, **options: Any) -> DataLoader:
    return DataLoader(TokenDataset(size, with_index=True), batch_size=batch_size, **options)


def quiet_trainer(world_size: int, strategy: Any, **options: Any) -> Trainer:
    defaults: Options = {
        "accelerator": "cpu",
        "devices": world_size,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    warnings.filterwarnings("ignore")
    return Trainer(strategy=strategy, **(defaults | options))


def fit_rank(
    rank: int,
    world_size: int,
    store: str,
    config: ModelConfig,
    strategy: Options,
    data: Options,
    trainer: Options,
    module: Options | None = None,
    val: Options | None = None,
) -> FitResult:
    """One member's fit in fp64."""
    torch.set_default_dtype(torch.float64)
    model = Language(config, seed=rank, **(module or {}))
    recorder = StepRecorder()
    fit = quiet_trainer(world_size, NTPStrategy(**strategy), callbacks=[recorder], **trainer)
    watched = loaders(**data)
    fit.fit(model, watched, loaders(**val) if val else None)
    return FitResult(
        model.seen,
        [count == 0 for _, _, count in model.seen],
        recorder.norms,
        recorder.weights,
        {name: float(value) for name, value in fit.callback_metrics.items()},
        fit.global_step,
        {"shares": fit.strategy._loaders.shares},
    )


def history_of(results: Sequence[FitResult], leader: int = 0) -> History:
    history = History()
    for weights, norm in zip(results[leader].weights, results[leader].norms, strict=True):
        history.append(0.0, norm, weights)
    return history
