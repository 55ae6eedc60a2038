"""An ordinary training script: two replicas of degree 2, loggers, checkpoints, early stopping, a progress bar.

    python live_fit.py DIRECTORY [NAME=VALUE ...]

Each process writes what it saw into ``DIRECTORY/SEAT.INCARNATION.json``. The names are the fields of ``Options``.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from lightning_ntp import NTPStrategy
from lightning_ntp.config import Timeouts

# The limits for silence are wide, as a loaded machine is no fault; deaths are told by the launcher at once.
TIMEOUTS = Timeouts(
    lease_s=20.0, lease_margin_s=2.0, classify_s=23.0, join_s=30.0, hang_s=40.0, slow_hang_s=60.0, build_s=30.0,
    shutdown_grace_s=3.0, start_s=90.0, collective_s=120.0,
)  # fmt: skip
WORDS, LENGTH = 32, 8
STEPS = 4


@dataclass(frozen=True)
class Options:
    """What may be asked of the script.

    Attributes:
        degrees: Of the replicas, such as ``2,2``; empty for a dense run in this process.
        epochs: At most; early stopping ends it before.
        error: Where the member at ``culprit`` raises: ``training_step``, ``shapes`` (a RuntimeError there),
            ``callback``, ``exit``, ``configure_optimizers``, ``dataset``.
        culprit: A seat.
        respawn: As the strategy's.
        tolerant: Whether deaths are tolerated.
        await_return: Step before which all wait for a process that comes back.
        pause_s: Before each step.
        save_on_exception: As ModelCheckpoint's.
        linked: Whether last.ckpt is a link to the last one that was saved, the learning rate follows the validation,
            and validation comes twice an epoch.
    """

    degrees: str = "2,2"
    epochs: int = 8
    error: str = ""
    culprit: str = "r1.s0"
    respawn: str = "never"
    tolerant: int = 1
    await_return: int = -1
    pause_s: float = 0.0
    save_on_exception: int = 0
    linked: int = 0

    @classmethod
    def parse(cls, words: list[str]) -> Options:
        kinds = {entry.name: type(entry.default) for entry in fields(cls)}
        given = dict(word.split("=", 1) for word in words)
        return cls(**{name: kinds[name](value) for name, value in given.items()})

    @property
    def num_replicas(self) -> int:
        return len(self.degrees.split(",")) if self.degrees else 1


def whoami() -> str:
    """Seat and incarnation of this process; its rank where there are no seats, ``dense`` where there is no job."""
    if "NTP_SEAT" in os.environ:
        return f"{os.environ['NTP_SEAT']}.{os.environ.get('NTP_INCARNATION', '0')}"
    return f"rank{os.environ['RANK']}" if "RANK" in os.environ else "dense"


class Sentences(Dataset):
    """Two words of three follow from the one before, the third is random. ``raises``: half of it cannot be read."""

    def __init__(self, size: int, seed: int, raises: bool = False) -> None:
        self.words = torch.randint(WORDS, (size, LENGTH), generator=torch.Generator().manual_seed(seed))
        for place in range(1, LENGTH):
            if place % 3:
                self.words[:, place] = (5 * self.words[:, place - 1] + 3) % WORDS
        self.raises = raises

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> Tensor:
        if self.raises and index >= 8:
            write_whole("raised", str(time.monotonic()))
            raise ValueError(f"{whoami()}: a mistake in dataset")
        return self.words[index]


class Net(LightningModule):
    """A next-word model that learns its few sentences by heart, so that its validation loss soon rises."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.options = options
        self.embed, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.ntp_plan = {"embed": "vocab", "up": "colwise", "down": "rowwise", "head": "colwise(gather_output=True)"}

    def loss(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        x = x + self.down(self.up(x).relu())
        return cross_entropy(self.head(x)[:, :-1].flatten(0, 1), words[:, 1:].flatten())

    def training_step(self, words: Tensor, batch_idx: int) -> Tensor:
        self.may_raise("training_step")
        self.may_raise("shapes")
        loss = self.loss(words)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, words: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(words), sync_dist=True)

    def configure_optimizers(self) -> Any:
        self.may_raise("configure_optimizers", 0)
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.015)
        if not self.options.linked:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0)
        return [optimizer], [{"scheduler": scheduler, "monitor": "val_loss", "interval": "step", "frequency": 3}]

    def may_raise(self, place: str, step: int = 2) -> None:
        """Raise if that is asked for; the time of it is left in a file."""
        if self.options.error == place and whoami() == f"{self.options.culprit}.0" and self.global_step == step:
            write_whole("raised", str(time.monotonic()))
            if place == "exit":
                sys.exit(3)
            kind = RuntimeError if place == "shapes" else ValueError
            raise kind(f"{whoami()}: a mistake in {place}")


class Witness(Callback):
    """Notes who led after each step, and what every process has at its end."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.leaders: dict[int, str] = {}

    def on_train_batch_start(self, trainer: Trainer, module: Net, *_: Any) -> None:
        time.sleep(self.options.pause_s)
        module.may_raise("callback")
        module.may_raise("exit")
        if trainer.global_step == self.options.await_return:
            await_return(trainer, 60.0)

    def on_train_batch_end(self, trainer: Trainer, module: Net, *_: Any) -> None:
        if isinstance(trainer.strategy, NTPStrategy):
            topology = trainer.strategy.topology
            self.leaders[trainer.global_step - 1] = str(topology.members[topology.leader])
        write_whole(f"{whoami()}.step", f"{trainer.global_step} {os.getpid()}")

    def report(self, trainer: Trainer) -> None:
        checkpoint, stopping = trainer.checkpoint_callback, trainer.early_stopping_callback
        told = {
            "leaders": self.leaders,
            "is_leader": trainer.is_global_zero,
            "global_step": trainer.global_step,
            "best": os.path.relpath(checkpoint.best_model_path),
            "score": float(checkpoint.best_model_score),
            "last": os.path.relpath(checkpoint.last_model_path),
            "stopped_epoch": stopping.stopped_epoch,
        }
        write_whole(f"{whoami()}.json", json.dumps(told))


def await_return(trainer: Trainer, limit_s: float) -> None:
    """Wait until somebody waits for admission, or all seats are taken."""
    survivor, until = trainer.strategy._engine, time.monotonic() + limit_s
    while not survivor.membership.joiner_waits and time.monotonic() < until:
        if len(survivor.view.members) == len(survivor.founding.members):
            return
        time.sleep(0.01)


def write_whole(name: str, text: str) -> None:
    """Nobody reads half of it."""
    Path(f"{name}.part").write_text(text)
    Path(f"{name}.part").rename(name)


def loader(size: int, batch_size: int, seed: int, **more: Any) -> DataLoader:
    raises = more.pop("raises", False)
    return DataLoader(Sentences(size, seed, raises), batch_size=batch_size, **more)


def build(directory: str, options: Options) -> Trainer:
    strategy: Any = "auto"
    if options.degrees:
        strategy = NTPStrategy(
            degrees=[int(degree) for degree in options.degrees.split(",")],
            respawn=options.respawn,
            fault_tolerance=bool(options.tolerant),
            timeouts=TIMEOUTS,
        )
    checkpoint = ModelCheckpoint(
        monitor="val_loss",
        save_last="link" if options.linked else True,
        save_on_exception=bool(options.save_on_exception),
    )
    return Trainer(
        accelerator="cpu",
        devices=sum(map(int, options.degrees.split(","))) if options.degrees else 1,
        strategy=strategy,
        max_epochs=options.epochs,
        val_check_interval=0.5 if options.linked else 1.0,
        log_every_n_steps=1,
        logger=[CSVLogger(directory, name="csv"), TensorBoardLogger(directory, name="tensorboard")],
        callbacks=[Witness(options), EarlyStopping("val_loss", patience=2), checkpoint, TQDMProgressBar()],
        enable_model_summary=False,
    )


def main(directory: str, options: Options) -> None:
    """Train in ``directory``."""
    warnings.filterwarnings("ignore")
    os.chdir(directory)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    trainer, module = build(".", options), Net(options)
    more: dict[str, Any] = {}
    if options.error == "dataset":
        more = {"raises": whoami() == f"{options.culprit}.0", "num_workers": 1}
    batch_size = 2 * 2 // options.num_replicas
    trainer.fit(module, loader(4 * STEPS, batch_size, 1, **more), loader(8, batch_size, 2))
    trainer.callbacks[0].report(trainer)


if __name__ == "__main__":
    main(sys.argv[1], Options.parse(sys.argv[2:]))
