"""How far the run is, how fast it was, and the table at its end."""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table

from gpt.parallel import Replica
from gpt.timeline import Entry


class Stopwatch(Callback):
    """Counts optimizer steps, their samples, and the seconds they took, validation not included.

    Args:
        samples_of: Samples of a global batch at present: they change when members go and ``global_batch`` shrinks.
    """

    def __init__(self, samples_of: Callable[[Trainer], int]) -> None:
        self.steps = self.samples = 0
        self.seconds = 0.0
        self._samples_of = samples_of
        self._since = 0.0
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step
        self._since = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self.steps += 1
            self.samples += self._samples_of(trainer)

    def leave_out(self, seconds: float) -> None:
        """Do not count so many of the seconds that are being measured."""
        self.seconds -= seconds

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds += time.perf_counter() - self._since

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds += time.perf_counter() - self._since


class ProgressLines(Callback):
    """A line now and then, for output that goes into a file: a progress bar would fill it."""

    def __init__(self, num_lines: int = 10) -> None:
        self.num_lines = num_lines
        self._told = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        step, steps = trainer.global_step, trainer.max_steps
        due = step in (1, steps) or step % max(1, steps // self.num_lines) == 0
        if due and step > self._told:
            self._told = step
            self._tell(trainer, "train_loss")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tell(trainer, "val_loss")

    def _tell(self, trainer: Trainer, name: str) -> None:
        if trainer.is_global_zero:
            loss = float(trainer.callback_metrics[name])
            print(f"step {trainer.global_step:>5} of {trainer.max_steps}   {name} {loss:.3f}", flush=True)


@dataclass(frozen=True)
class Outcome:
    """What the run's metrics file says.

    Attributes:
        first_loss: Training loss of the first optimizer step, nats a byte.
        last_loss: Mean training loss of the last steps: that of one batch jumps about.
        num_last: Of how many steps.
        val_loss: Loss of the last validation.
    """

    first_loss: float
    last_loss: float
    num_last: int
    val_loss: float


def read_metrics(run: Path) -> dict[str, list[float]]:
    """Both losses, from ``metrics.csv`` in the run's folder.

    Raises:
        ValueError: if the file lacks a column or has no value in it.
    """
    metrics = run / "metrics.csv"
    with metrics.open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = {name: [float(row[name]) for row in rows if row.get(name)] for name in ("train_loss", "val_loss")}
    for name, values in columns.items():
        if not values:
            raise ValueError(f"{metrics} has no value of {name}: the run ended before its first one")
    return columns


def read_outcome(run: Path, num_last: int = 10) -> Outcome:
    """Read the losses of a run from its folder: the file, unlike a process, saw the run from its first step on.

    Raises:
        ValueError: as :func:`read_metrics`.
    """
    columns = read_metrics(run)
    last = columns["train_loss"][-num_last:]
    return Outcome(columns["train_loss"][0], statistics.fmean(last), len(last), columns["val_loss"][-1])


def print_report(
    replicas: Sequence[Replica],
    outcome: Outcome,
    facts: dict[str, Any],
    timeline: Sequence[Entry] = (),
    console: Console | None = None,
) -> None:
    """Print who took which share, then the losses and ``facts``, a line each, then what happened."""
    console = console or Console()
    total = sum(replica.share for replica in replicas)
    who = Table(title="replicas", title_justify="left")
    for heading in ("replica", "degree", "share", "of the global batch"):
        who.add_column(heading, justify="left" if heading == "replica" else "right")
    for replica in replicas:
        who.add_row(replica.name, str(replica.degree), str(replica.share), f"{replica.share / total:.1%}")
    what = Table(title="run", title_justify="left", show_header=False)
    losses = {
        "loss, first step": f"{outcome.first_loss:.3f} nats a byte",
        f"loss, last {outcome.num_last} steps": f"{outcome.last_loss:.3f} nats a byte (mean)",
        "validation loss": f"{outcome.val_loss:.3f} nats a byte",
    }
    for name, value in (losses | facts).items():
        what.add_row(name, str(value))
    console.print(who, what)
    if timeline:
        console.print(_timeline_table(timeline))


def _timeline_table(timeline: Sequence[Entry]) -> Table:
    table = Table(title="timeline", title_justify="left")
    for heading in ("time", "step", "event", "degrees", "shares", "seconds to recover"):
        table.add_column(heading, justify="right" if heading in ("step", "seconds to recover") else "left")
    for entry in timeline:
        table.add_row(*map(str, astuple(entry)))
    return table
