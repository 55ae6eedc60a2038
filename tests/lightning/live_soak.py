"""A training in which one member after the other dies and comes back, and what that leaves in one that stays."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from lightning_ntp.compat import torch as compat
from lightning_ntp.faults import FaultPlan, Injector
from lightning_ntp.strategies import process
from tests.lightning.live_fit import whoami
from tests.lightning.live_loops import AwaitReturn, Degrees, make_trainer
from tests.lightning.runs import SMALL, Language, loader

PERIOD = 5
"""Steps from one death to the next: all are there; one dies; all have seen it; it is asked back; it is waited for."""

STAYS = "r1.s1"
_VICTIMS = ("r0.s0", "r0.s1", "r1.s0")
_MOMENTS = ("forward", "data_parallel", "vote", "tensor_parallel#5", "step", "backward", "between")


@dataclass(frozen=True)
class Sample:
    """Of the member that stays, when all are there again.

    Attributes:
        threads: Of the process, torch's and gloo's too.
        descriptors: Open file descriptors.
        resident_mb: Memory in mebibytes.
        objects: That the garbage collector knows.
        keys: In the job's store.
        collectives_kept: How many never ended, and are kept for good with their group.
    """

    threads: int
    descriptors: int
    resident_mb: float
    objects: int
    keys: int
    collectives_kept: int


def kills(number: int) -> list[str]:
    """The deaths by number."""
    return [
        f"kill {_VICTIMS[i % len(_VICTIMS)]}@{PERIOD * i + 1}:{_MOMENTS[i % len(_MOMENTS)]}" for i in range(number)
    ]


def returns(number: int) -> str:
    """The text of the fault plan."""
    return ", ".join(f"return {_VICTIMS[i % len(_VICTIMS)]}@{PERIOD * i + 3}" for i in range(number))


class Deaths(Callback):
    """Lets this process die when it is its turn; a planned fault is done by the first process of a seat only."""

    def __init__(self, number: int) -> None:
        seat, incarnation = whoami().rsplit(".", 1)
        mine = [text for text in kills(number) if text.startswith(f"kill {seat}@")]
        self._faults = FaultPlan.parse(", ".join(mine[int(incarnation) : int(incarnation) + 1]))

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        process.ProcessMember.current.membership.progress.on_moment = Injector(self._faults).at


class Witness(Callback):
    """Samples the member that stays before each death."""

    def __init__(self, samples: list[Sample]) -> None:
        self._samples, self._kept = samples, 0
        keep = compat.keep_for_good

        def keep_and_count(*objects: object) -> None:
            self._kept += 1
            keep(*objects)

        compat.keep_for_good = keep_and_count

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step % PERIOD != 1 or not whoami().startswith(STAYS):
            return
        gc.collect()
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        self._samples.append(
            Sample(
                len(os.listdir("/proc/self/task")),
                len(os.listdir("/proc/self/fd")),
                pages * os.sysconf("SC_PAGESIZE") / 2**20,
                len(gc.get_objects()),
                process.ProcessMember.current._store.num_keys(),
                self._kept,
            )
        )


def soak(degrees: Degrees, number: int) -> tuple[list[Sample], int, list[str]]:
    """Train through ``number`` deaths.

    Returns:
        Samples, steps, and this process's Python threads at the end.
    """
    torch.set_default_dtype(torch.float64)
    samples: list[Sample] = []
    waits = [AwaitReturn(PERIOD * index + 4, 60.0) for index in range(number)]
    trainer = make_trainer(degrees, callbacks=[Deaths(number), Witness(samples), *waits], max_epochs=1)
    module = Language(SMALL, seed=0)
    trainer.fit(module, loader(8 * (PERIOD * number + 2), 8 // len(degrees)))
    module.seen.clear()
    return samples, trainer.global_step, [thread.name for thread in threading.enumerate()]
