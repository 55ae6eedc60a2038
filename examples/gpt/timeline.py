"""What happened to the job: an ordinary callback with hooks that nonuniform tensor parallelism calls."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

FILE = "timeline.csv"
RETURNED = "returned: "
"""How the event begins when members return."""


@dataclass(frozen=True)
class Entry:
    """One line of the timeline.

    Attributes:
        time: Of the day.
        step: The optimizer step that was under way, from 0; once recovered, the one that goes on.
        event: What happened, and at which seats.
        degrees: Degree of each replica from then on; 0 where nobody is left.
        shares: Samples of a global batch that each takes from then on.
        seconds: How long it took, from leaving the collectives until channels and shards were there again.
    """

    time: str
    step: int
    event: str
    degrees: str = ""
    shares: str = ""
    seconds: str = ""


class Timeline(Callback):
    """Collects what happens, on every member: so whoever leads at the end has seen it, whoever led before.

    Lightning knows nothing of the hooks ``on_ntp_...``: the strategy calls them on every callback that has them.

    Attributes:
        entries: In the order in which they happened.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def on_ntp_view(self, trainer: Trainer, pl_module: LightningModule, event: Any) -> None:
        if event.gone:
            self._note(event, f"{'left' if event.cause == 'planned' else 'lost'}: {_names(event.gone)}")
        elif not event.joined:
            self._note(event, f"interrupted: {event.cause}")

    def on_ntp_recovered(self, trainer: Trainer, pl_module: LightningModule, event: Any) -> None:
        self._note(event, "recovered", trainer)

    def on_ntp_rejoin(self, trainer: Trainer, pl_module: LightningModule, event: Any) -> None:
        self._note(event, RETURNED + _names(event.joined), trainer)

    def _note(self, event: Any, text: str, trainer: Trainer | None = None) -> None:
        state: tuple[str, ...] = ()
        if trainer is not None:
            shares = trainer.strategy.shares
            degrees = [event.degrees_after.get(replica, 0) for replica in range(len(shares))]
            state = (_row(degrees), _row(shares), f"{event.seconds['total']:.2f}" if event.seconds else "")
        self.entries.append(Entry(time.strftime("%H:%M:%S"), event.step + 1, text, *state))


def write_timeline(entries: Iterable[Entry], run: Path) -> None:
    """Write ``timeline.csv`` into the run's folder, a column for each field of an entry."""
    with (run / FILE).open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Entry)])
        writer.writeheader()
        writer.writerows(asdict(entry) for entry in entries)


def read_events(run: Path) -> list[str]:
    """The events in the ``timeline.csv`` of a run's folder."""
    with (run / FILE).open(newline="") as file:
        return [row["event"] for row in csv.DictReader(file)]


def _names(seats: Iterable[Any]) -> str:
    return " ".join(str(seat) for seat in seats)


def _row(numbers: Iterable[int]) -> str:
    return " ".join(str(number) for number in numbers)
