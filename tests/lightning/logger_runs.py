"""Whole Trainers with loggers and progress bars, and what each rank wrote."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils.tensorboard  # TensorBoardLogger needs it: here the zygote imports it, once for all ranks
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ntp import NTPStrategy
from tests.dist.bare import plan_for
from tests.support.batches import TokenDataset
from tests.support.models import ModelConfig, build, loss_fn

MODEL = ModelConfig(layers=1)
STEPS, EPOCHS, SAMPLES = 4, 2, 16


class Logging(LightningModule):
    """Logs in every way that there is. Batches are (ids, tokens)."""

    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = build(MODEL)
        self.ntp_plan = plan_for(MODEL).with_prefix("model")
        self.example_input_array = torch.zeros(1, 4, dtype=torch.int64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        ids, tokens = batch
        loss = loss_fn(self.model(tokens), tokens)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True, batch_size=len(ids))
        self.log("samples", float(len(ids)), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log("rank", float(self.global_rank))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        ids, tokens = batch
        self.log("val_loss", loss_fn(self.model(tokens), tokens), sync_dist=True, batch_size=len(ids))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}


@dataclass
class Written:
    """What a rank printed, and where it thinks that logs and the best file are."""

    out: str
    err: str
    log_dir: str
    best: str
    metrics: dict[str, float]


def default_rank(rank: int, world_size: int, store: str) -> Written:
    """A Trainer with nothing but the strategy's name."""
    return _fit(Trainer(accelerator="cpu", devices=4, strategy="ntp", max_epochs=EPOCHS, log_every_n_steps=1))


def loggers_rank(rank: int, world_size: int, store: str, degrees: tuple[int, ...]) -> Written:
    """Two loggers, another bar, a monitor of learning rates."""
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=NTPStrategy(degrees=list(degrees)),
        max_epochs=EPOCHS,
        log_every_n_steps=1,
        logger=[CSVLogger(".", name="csv"), TensorBoardLogger(".", name="tensorboard")],
        callbacks=[TQDMProgressBar(), LearningRateMonitor("epoch")],
    )
    return _fit(trainer)


def graph_rank(rank: int, world_size: int, store: str) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=NTPStrategy(degrees=[2]),
        logger=TensorBoardLogger(".", log_graph=True),
        max_steps=1,
    )
    _fit(trainer)


def _fit(trainer: Trainer) -> Written:
    batch_size = SAMPLES // STEPS // trainer.strategy.topology.num_replicas
    data = DataLoader(TokenDataset(SAMPLES, with_index=True), batch_size=batch_size)
    trainer.fit(Logging(), data, data)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    texts = [Path(f"/proc/self/fd/{number}").read_text() for number in (1, 2)]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Written(*texts, trainer.log_dir, trainer.checkpoint_callback.best_model_path, metrics)
