"""Processes that run one training side by side: the first leads and dies, the second takes its duties over, and so on.

No collective joins them: all compute the same, on plain Lightning. Only ``SideBySide`` knows who leads.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils.tensorboard  # here the zygote imports it, once for all ranks
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    ThroughputMonitor,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_ntp.strategies.takeover import LeaderDuties
from tests.support.processes import is_running

STEPS, VAL_STEPS = 4, 2
VAL_LOSS = (3.0, 2.0, 1.0, 4.0, 5.0, 6.0)  # by epoch: the third is best
STOPPED_EPOCH = 4

Moment = tuple[str, int]  # a hook, and how many calls of it come before (the sanity check's do not count)


class Left(Exception):
    """The old leader leaves alive."""


@dataclass(frozen=True)
class Takeover:
    """What happens.

    Attributes:
        dies: When the leader is killed, for each leader but the last.
        follows: When the next one takes over.
        torn: Bytes that the last line of metrics.csv lacks then.
        drained: Whether the leader hands its duties over instead of being killed.
        bar: Class of the progress bar.
        throughput: Whether there is a ThroughputMonitor.
        loggers: Make more loggers.
    """

    dies: tuple[Moment, ...]
    follows: tuple[Moment, ...]
    torn: int = 0
    drained: bool = False
    bar: str = "tqdm"
    throughput: bool = False
    loggers: tuple[Callable[[], Logger], ...] = ()


@dataclass
class Seen:
    """What the last leader has at the end.

    Attributes:
        out, err: What it printed.
        best, last: Paths of checkpoints.
        stopped_epoch: When EarlyStopping ended it.
        metrics: The Trainer's.
        places: Folder and version of each logger.
    """

    out: str
    err: str
    best: str
    last: str
    stopped_epoch: int
    metrics: dict[str, float]
    places: list[tuple[str | None, Any]]


class SideBySide(SingleDeviceStrategy):
    """Who leads, and what leaders say: object number n lies in a file of that number."""

    def __init__(self, seat: int, takeover: Takeover | None) -> None:
        super().__init__(device="cpu")
        self.seat, self.takeover = seat, takeover
        self._num_casts = 0
        self.set_rank(seat)
        write_whole(Path(f"pid{seat}"), str(os.getpid()).encode())

    def set_rank(self, rank: int) -> None:
        self.global_rank = rank_zero_only.rank = rank

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        path = Path(f"cast{self._num_casts}")
        self._num_casts += 1
        if not self.is_global_zero:
            wait_until(lambda: path.exists() or self.leader_is_gone())
        if path.exists():
            return pickle.loads(path.read_bytes())
        if not self.is_global_zero:
            self.lead()
        write_whole(path, pickle.dumps(obj))
        return obj

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        self.duties = LeaderDuties(trainer)
        self.duties.share(self.broadcast)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        self.duties.flush()
        return result

    def teardown(self) -> None:
        self.duties.close()
        super().teardown()

    def lead(self) -> None:
        print("\n--- takes over ---", flush=True)
        self.set_rank(0)
        self.duties.take_over()

    def leader_is_gone(self) -> bool:
        """Whether the one before this has died, or handed over."""
        path = Path(f"pid{self.seat - 1}")
        return Path("handed_over").exists() or (path.exists() and not is_running(int(path.read_text())))

    def reach(self, moment: Moment) -> None:
        """Die, or wait for the leader's death and lead, if this is the moment for it."""
        if self.takeover is None:
            return
        if self.seat and moment == self.takeover.follows[self.seat - 1] and not self.is_global_zero:
            wait_until(self.leader_is_gone)
            if self.takeover.torn:
                [path] = Path("logs").glob("csv/*/metrics.csv")
                os.truncate(path, path.stat().st_size - self.takeover.torn)
            self.lead()
        if self.seat < len(self.takeover.dies) and moment == self.takeover.dies[self.seat]:
            if not self.takeover.drained:
                os.kill(os.getpid(), signal.SIGKILL)
            self.set_rank(1)
            self.duties.hand_over()
            Path("handed_over").touch()
            raise Left


def write_whole(path: Path, data: bytes) -> None:
    path.with_suffix(".new").write_bytes(data)
    path.with_suffix(".new").rename(path)


def wait_until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("the other process did not get there")
        time.sleep(0.005)


class Moments(Callback):
    """Tells the strategy when a hook is called."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def reach(self, trainer: Trainer, hook: str) -> None:
        hook = f"sanity_{hook}" if trainer.sanity_checking else hook
        trainer.strategy.reach((hook, self._counts[hook]))
        self._counts[hook] += 1

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.reach(trainer, "train_batch_start")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.reach(trainer, "train_batch_end")


class Saving(ModelCheckpoint):
    """The last callback of an epoch; after it the epoch's means are logged."""

    def __init__(self, moments: Moments, **options: Any) -> None:
        super().__init__(**options)
        self.moments = moments

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, module)
        self.moments.reach(trainer, "epoch_saved")


class Line(LightningModule):
    """A line through points; logs in every way that there is."""

    def __init__(self, moments: Moments, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters("lr")
        self.layer = torch.nn.Linear(1, 1)
        self.moments = moments
        with torch.no_grad():
            self.layer.weight.fill_(0.5)
            self.layer.bias.fill_(0.0)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.moments.reach(self.trainer, "training_step")
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.moments.reach(self.trainer, "validation_step")
        self.log("val_loss", VAL_LOSS[self.current_epoch])
        self.log("val_error", (self.layer(batch[0]) - batch[1]).abs().mean(), on_step=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


def points(num_batches: int) -> DataLoader:
    x = torch.linspace(0, 1, 2 * num_batches)[:, None]
    return DataLoader(TensorDataset(x, 2 * x + 1), batch_size=2)


def wandb_logger() -> Logger:
    return WandbLogger(project="takeover", save_dir="logs", offline=True)


def mlflow_logger() -> Logger:
    return MLFlowLogger(tracking_uri="file:./logs/mlflow")


def fit_rank(rank: int, world_size: int, store: str, takeover: Takeover | None) -> Seen | None:
    """Train until EarlyStopping ends it; the undisturbed run has one process and no ``takeover``."""
    bars = {"tqdm": TQDMProgressBar, "rich": lambda: RichProgressBar(console_kwargs={"force_terminal": True})}
    moments, stopping = Moments(), EarlyStopping("val_loss", patience=2)
    checkpoint = Saving(moments, monitor="val_loss", save_last=True)
    bar = bars[takeover.bar if takeover else "tqdm"]()
    callbacks = [LearningRateMonitor("step"), moments, stopping, checkpoint, bar]
    if takeover and takeover.throughput:
        callbacks.append(ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0])))
    more = [make() for make in (takeover.loggers if takeover else ())]
    loggers = [CSVLogger("logs", name="csv"), TensorBoardLogger("logs", name="tensorboard"), *more]
    trainer = Trainer(
        accelerator="cpu",
        strategy=SideBySide(rank, takeover),
        max_epochs=len(VAL_LOSS),
        log_every_n_steps=1,
        logger=loggers,
        callbacks=callbacks,
        enable_model_summary=False,
    )
    try:
        trainer.fit(Line(moments), points(STEPS), points(VAL_STEPS))
    except Left:
        return None
    if wandb_logger in (takeover.loggers if takeover else ()):
        sys.modules["wandb"].teardown()  # else its service outlives us: a rank leaves without cleaning up
    sys.stdout.flush()
    texts = [Path(f"/proc/self/fd/{number}").read_text() for number in (1, 2)]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    places = [(logger.log_dir, logger.version) for logger in loggers]
    return Seen(*texts, checkpoint.best_model_path, checkpoint.last_model_path, stopping.stopped_epoch, metrics, places)
