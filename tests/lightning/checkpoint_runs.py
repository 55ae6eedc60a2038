"""Whole Trainers that save, stop and go on: under the strategy, or plain in one process (``degrees=None``)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Sampler

from lightning_ntp import NTPStrategy
from tests.dist.bare import plan_for
from tests.support.batches import TokenDataset
from tests.support.models import ModelConfig, build, loss_fn
from tests.support.reference import make_optimizer

SIZE = 44  # samples of an epoch; no global batch divides it
MODEL = ModelConfig(num_kv_heads=2, tied=True, bias=True, layers=1)


class Scheduled(LightningModule):
    """The test transformer under AdamW with a learning rate that falls at every step; batches are (ids, tokens)."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.model = build(config, seed)
        self.ntp_plan = plan_for(config).with_prefix("model")
        self.seen: list[list[int]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        ids, tokens = batch
        self.seen.append(ids.tolist())
        loss = loss_fn(self.model(tokens), tokens)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        _, tokens = batch
        self.log("val_loss", loss_fn(self.model(tokens), tokens), sync_dist=True, batch_size=len(tokens))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = make_optimizer("adamw", self.parameters())
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, lambda step: 0.9**step), "interval": "step"},
        }


class Shuffled(Sampler[int]):
    """A sampler of the user's whose order depends on the epoch alone, so that plain Lightning has the same one."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist()


def loaders(size: int, batch_size: int) -> DataLoader:
    return DataLoader(TokenDataset(size, with_index=True), batch_size=batch_size)


def quiet_trainer(world_size: int, strategy: Any, **options: Any) -> Trainer:
    warnings.filterwarnings("ignore")
    defaults = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(accelerator="cpu", devices=world_size, strategy=strategy, **(defaults | options))


class Follow(Callback):
    """The dense weights and the learning rate after every optimizer step."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.rates: dict[int, float] = {}
        self.start = 0

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.start = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if trainer.global_step > max(self.start, *self.weights, 0):
            state = trainer.strategy.lightning_module_state_dict()
            self.weights[trainer.global_step] = {name: tensor.clone() for name, tensor in state.items()}
            self.rates[trainer.global_step] = trainer.optimizers[0].param_groups[0]["lr"]


@dataclass(frozen=True)
class Job:
    """One ``fit``.

    Attributes:
        degrees: Of the replicas; None for a plain Trainer in one process.
        batch_size: Of the DataLoader.
        load: File to go on from.
        folder: Where to save: ``step=N.ckpt`` every ``every`` steps, ``epoch=N.ckpt`` after every epoch (or, under
            ``val_every``, ``val-step=N.ckpt`` after every validation), and ``end.ckpt``.
        val_every: Batches between validations; None for no validation.
        shuffle: ``"torch"``: ``shuffle=True``; ``"sampler"``: the same order with and without the strategy.
    """

    degrees: tuple[int, ...] | None
    batch_size: int
    folder: str
    load: str | None = None
    every: int = 4
    accumulate: int = 1
    max_epochs: int = 2
    val_every: int | None = None
    shuffle: str = "sampler"
    seed: int = 0

    @property
    def world_size(self) -> int:
        return sum(self.degrees or (1,))


@dataclass
class Told:
    """What a rank saw: by optimizer step weights (on the leader) and learning rates; sample ids by batch; metrics."""

    weights: dict[int, dict[str, Tensor]]
    rates: dict[int, float]
    seen: list[list[int]]
    metrics: dict[str, float]


def run_job(rank: int, world_size: int, store: str, job: Job) -> Told:
    torch.set_default_dtype(torch.float64)
    module, follow = Scheduled(MODEL, seed=job.seed), Follow()
    by_step = ModelCheckpoint(job.folder, filename="{step}", every_n_train_steps=job.every, save_top_k=-1)
    by_epoch = ModelCheckpoint(job.folder, filename="val-{step}" if job.val_every else "{epoch}", save_top_k=-1)
    trainer = quiet_trainer(
        job.world_size,
        "auto" if job.degrees is None else NTPStrategy(degrees=list(job.degrees)),
        max_epochs=job.max_epochs,
        accumulate_grad_batches=job.accumulate,
        gradient_clip_val=1.0,
        enable_checkpointing=True,
        val_check_interval=job.val_every,
        callbacks=[follow, by_step, by_epoch],
    )
    order = {"sampler": Shuffled(SIZE)} if job.shuffle == "sampler" else {"shuffle": True}
    data = DataLoader(TokenDataset(SIZE, with_index=True), batch_size=job.batch_size, **order)
    trainer.fit(module, data, loaders(10, 2) if job.val_every else None, ckpt_path=job.load)
    trainer.save_checkpoint(f"{job.folder}/end.ckpt")
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val")}
    return Told(follow.weights, follow.rates, module.seen, metrics)


# What callbacks do


@dataclass
class Watched:
    """What a rank saw of a run with ModelCheckpoint and EarlyStopping."""

    best: str
    last: str
    kept: list[str]
    stopped_epoch: int
    epochs: int
    validated: float
    dense: float | None
    steps: tuple[int, int]


class Worse(Scheduled):
    """Learns in the first two epochs and then unlearns, so that the best file is not the last one."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if self.current_epoch < 2 else -20 * loss  # AdamW's momentum would still go down for long


def watch(rank: int, world_size: int, store: str, degrees: tuple[int, ...], folder: str) -> Watched:
    """Fit with early stopping, validate the best file, then fit on with the same Trainer."""
    torch.set_default_dtype(torch.float64)
    files = ModelCheckpoint(
        folder, monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}", save_weights_only=False
    )
    stopping = EarlyStopping("val_loss", patience=1)
    trainer = quiet_trainer(
        world_size,
        NTPStrategy(degrees=list(degrees)),
        max_epochs=6,
        enable_checkpointing=True,
        callbacks=[files, stopping],
    )
    module, val = Worse(MODEL, seed=0), loaders(10, 2)
    trainer.fit(module, loaders(16, 4), val)
    stopped, first = stopping.stopped_epoch, trainer.global_step
    best, last, epochs = files.best_model_path, files.last_model_path, trainer.current_epoch
    kept = sorted(path.name for path in Path(folder).iterdir())
    [validated] = trainer.validate(module, val, ckpt_path="best", verbose=False)
    dense = dense_loss(best) if rank == 0 else None
    stopping.patience = 100
    trainer.should_stop = False
    trainer.fit_loop.max_epochs = epochs + 1
    trainer.fit(module, loaders(16, 4), val)
    return Watched(best, last, kept, stopped, epochs, validated["val_loss"], dense, (first, trainer.global_step))


def dense_loss(path: str) -> float:
    """Loss over the ten validation samples of the file in plain torch."""
    module = Scheduled.load_from_checkpoint(path, config=MODEL)
    dataset = TokenDataset(10)
    tokens = torch.stack([dataset[index] for index in range(10)])
    with torch.no_grad():
        return loss_fn(module.model(tokens), tokens).item()


# What goes wrong


@dataclass
class Refused:
    """The errors of saves that cannot be, by what was tried, and the numbers of the steps around them."""

    errors: dict[str, str]
    steps: list[int]


class Unpicklable(Scheduled):
    """Puts something into the leader's checkpoint that cannot be written, when told so."""

    spoil = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.spoil and self.trainer.is_global_zero:
            checkpoint["spoilt"] = lambda: None


def save_badly(rank: int, world_size: int, store: str, folder: str) -> Refused:
    """Saves that fail leave the old file and the training as they were."""
    torch.set_default_dtype(torch.float64)
    module, errors = Unpicklable(MODEL), {}
    trainer = quiet_trainer(world_size, NTPStrategy(degrees=[2, 1]), max_epochs=1)
    trainer.fit(module, loaders(16, 4))
    steps = [trainer.global_step]

    def attempt(what: str, path: str, **options: Any) -> None:
        try:
            trainer.save_checkpoint(path, **options)
        except Exception as error:
            errors[what] = f"{type(error).__name__}: {error}"

    trainer.save_checkpoint(f"{folder}/new/folders/good.ckpt")
    attempt("below a file", f"{folder}/new/folders/good.ckpt/x.ckpt")
    attempt("options", f"{folder}/other.ckpt", storage_options={"a": 1})
    module.spoil = True
    attempt("spoilt", f"{folder}/new/folders/good.ckpt")
    module.spoil = False
    trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    trainer.validate(module, loaders(10, 2), ckpt_path=f"{folder}/weights.ckpt", verbose=False)
    attempt("url", f"memory://{folder}/remote.ckpt")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loaders(16, 4), ckpt_path=f"{folder}/new/folders/good.ckpt")
    return Refused(errors, [*steps, trainer.global_step])


def load_badly(rank: int, world_size: int, store: str, files: dict[str, str]) -> dict[str, str]:
    """The error of every file that ``fit`` cannot go on from."""
    torch.set_default_dtype(torch.float64)
    errors = {}
    for what, path in files.items():
        trainer = quiet_trainer(world_size, NTPStrategy(degrees=[2, 1]), max_epochs=3)
        try:
            trainer.fit(Scheduled(MODEL), loaders(16, 4), ckpt_path=path)
        except Exception as error:
            errors[what] = f"{type(error).__name__}: {error}"
    return errors
