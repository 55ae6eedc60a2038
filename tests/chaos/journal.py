"""What each process of a job tells of itself while it runs: one that is killed has told everything before."""

from __future__ import annotations

import os
import pickle
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lightning_ntp.layout import ParameterLayout

StepKey = tuple[int, int]
"""(epoch, window)."""

Arrays = dict[str, np.ndarray]


@dataclass
class Pass:
    """One pass through ``training_step``.

    Attributes:
        key: The window that it belongs to.
        index: (micro-batch, part of it).
        generation: In which it ran: what was run again has a later one.
        ids: Its samples; none for a dummy.
        loss: Their mean loss.
        weight: What it counts.
        note: Of the module, equal on all slots of a replica.
    """

    key: StepKey
    index: tuple[int, int]
    generation: int
    ids: list[int]
    loss: float
    weight: float
    note: Any = None


@dataclass
class StepState:
    """This member after a committed step.

    Attributes:
        step: Counted from 0.
        weights: Local parameters by name.
        degree: Of its replica.
        slot: Its slot.
        norm: Of the dense gradient, from the vote.
        lr: Learning rate of the next step.
        states: States of the optimizer, by parameter and key: tensors of its shape; only if asked for.
        scalars: All else of optimizer and scheduler, as text; only if asked for.
    """

    step: int
    weights: Arrays
    degree: int
    slot: int
    norm: float
    lr: float
    states: dict[str, Arrays] = field(default_factory=dict)
    scalars: str = ""


@dataclass
class Told:
    """Something that happened, by name."""

    name: str
    value: Any


@dataclass
class Summary:
    """At the end of a process.

    Attributes:
        metrics: Logged values.
        global_step: The Trainer's.
        leader: Whether it is the leader.
        error: What ended it; empty if it is done.
        notes: Of the module.
    """

    metrics: dict[str, float]
    global_step: int
    leader: bool
    error: str
    notes: Any


class Journal:
    """Appends entries to a file, with the time of each on the monotonic clock."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, entry: Any) -> None:
        """Hand one entry to the kernel, which keeps it whatever becomes of this process."""
        view = memoryview(pickle.dumps((time.monotonic(), entry)))
        while view:
            view = view[os.write(self._file, view) :]


@dataclass
class MemberReport:
    """The journal of one process, read.

    Attributes:
        name: Of the process, ``r0.s1.0``.
        passes: The last run of every window that it has begun, by window and index.
        steps: By step.
        layouts: How each parameter lies.
        views: As JSON, by generation: those it agreed on.
        ready: By generation, when it began its first step there and which.
        told: (time, name, value) of failures and changes.
        faults: (time, text) of planned faults that happened.
        loads: How often each ``load_state_dict`` was called.
        summary: If it came so far.
    """

    name: str
    passes: dict[StepKey, dict[tuple[int, int], Pass]] = field(default_factory=dict)
    steps: dict[int, StepState] = field(default_factory=dict)
    stepped: dict[int, float] = field(default_factory=dict)
    layouts: dict[str, ParameterLayout] = field(default_factory=dict)
    views: dict[int, dict[str, Any]] = field(default_factory=dict)
    ready: dict[int, tuple[float, int]] = field(default_factory=dict)
    told: list[tuple[float, str, Any]] = field(default_factory=list)
    faults: list[tuple[float, str]] = field(default_factory=list)
    loads: Counter[str] = field(default_factory=Counter)
    summary: Summary | None = None

    @property
    def seat(self) -> str:
        return self.name.rsplit(".", 1)[0]

    @property
    def replica(self) -> int:
        return int(self.name[1 : self.name.index(".")])

    @property
    def is_joiner(self) -> bool:
        return not self.name.endswith(".0")

    @classmethod
    def read(cls, path: Path) -> MemberReport:
        """Read a journal; a last entry that was cut off by the end of the process is left out."""
        report = cls(path.stem)
        with path.open("rb") as file:
            while True:
                try:
                    at, entry = pickle.load(file)
                except (EOFError, pickle.UnpicklingError):
                    return report
                report._add(at, entry)

    def _add(self, at: float, entry: Any) -> None:
        if isinstance(entry, Pass):
            self._add_pass(entry)
        elif isinstance(entry, StepState):
            self.steps[entry.step], self.stepped[entry.step] = entry, at
        elif isinstance(entry, Summary):
            self.summary = entry
        elif entry.name == "layouts":
            self.layouts = entry.value
        elif entry.name == "view":
            self.views[entry.value["generation"]] = entry.value
        elif entry.name == "ready":
            generation, step = entry.value
            self.ready.setdefault(generation, (at, step))
        elif entry.name == "fault":
            self.faults.append((at, entry.value))
        elif entry.name == "load":
            self.loads[entry.value] += 1
        else:
            self.told.append((at, entry.name, entry.value))

    def _add_pass(self, entry: Pass) -> None:
        known = self.passes.setdefault(entry.key, {})
        if any(other.generation < entry.generation for other in known.values()):
            known.clear()
        known[entry.index] = entry


def committed_passes(reports: Mapping[str, MemberReport], key: StepKey) -> dict[int, list[Pass]]:
    """The passes of a window's last run, by replica; of a replica, those of the member that tells most.

    A window is run again by all or by nobody, so its last run is that of the latest generation.
    """
    found = [(report, list(report.passes[key].values())) for report in reports.values() if key in report.passes]
    latest = max((entry.generation for _, entries in found for entry in entries), default=-1)
    by_replica: dict[int, list[Pass]] = {}
    for report, entries in found:
        last = [entry for entry in entries if entry.generation == latest]
        if len(last) > len(by_replica.get(report.replica, [])):
            by_replica[report.replica] = sorted(last, key=lambda entry: entry.index)
    return by_replica


def samples_by_window(reports: Mapping[str, MemberReport]) -> dict[StepKey, list[int]]:
    """Samples of every window's last run, in replica order."""
    found = {}
    for key in sorted({key for report in reports.values() for key in report.passes}):
        by_replica = committed_passes(reports, key)
        found[key] = [i for replica in sorted(by_replica) for entry in by_replica[replica] for i in entry.ids]
    return found
