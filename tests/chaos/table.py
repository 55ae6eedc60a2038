"""Deaths at every phase of a training, for every kind of victim: the rows of the exhaustive table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from tests.chaos.plan import MODEL
from tests.lightning.runs import Scenario
from tests.lightning.survive_runs import Scheduled, Trial, deadly_loader

WINDOWS, EPOCHS = 4, 2
STEP, LAST = 2, WINDOWS - 1
"""A step in the middle of the first epoch, and that epoch's last."""

DEGREES = ((3, 3), (3, 2))
PAIR = ("r0.s0", "r1.s1")  # no unit is held by these two alone

# By phase: step and moment.
ANYBODY = {
    "forward": (STEP, "forward#2"),
    "collective of a layer": (STEP, "tensor_parallel#7"),
    "backward": (STEP, "backward#3"),
    "DP sum": (STEP, "data_parallel#2"),
    "before the vote": (STEP, "vote"),
    "vote, first leg": (STEP, "replica_control"),
    "vote, last leg": (STEP, "replica_control#2"),
    "optimizer step": (STEP, "step"),
    "between steps": (STEP, "between"),
    "validation": (LAST, "evaluation"),
    "validation, second batch": (LAST, "evaluation#2"),
    "epoch end, metrics": (LAST, "outside"),
    "epoch end, is there a file": (LAST, "outside#5"),
    "checkpoint": (LAST, "outside#6"),
    "checkpoint, under way": (LAST, "control#12"),
    "last step of all": (EPOCHS * WINDOWS - 1, "step"),
    "last checkpoint": (EPOCHS * WINDOWS - 1, "outside#6"),
    "start": (0, "start"),
    "start, first channels": (0, "change"),
    "start, before the weights": (0, "outside#2"),
    "start, weights": (0, "outside#6"),
    "start, weights under way": (0, "world#5"),
    "start, ready": (0, "outside#11"),
    "start, sanity check": (0, "evaluation"),
}
RESHARDS = {"pre-reshard": "reshard", "post-reshard": "reshard#2"}
FIRST_BEFORE = {  # who dies before somebody dies in the recovery; with the victims it leaves a holder of every unit
    ((3, 3), "rank 0"): "r0.s2", ((3, 3), "middle"): "r0.s2", ((3, 3), "last"): "r0.s0",
    ((3, 2), "rank 0"): "r0.s1", ((3, 2), "middle"): "r0.s2", ((3, 2), "last"): "r0.s0",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One run of the table.

    Attributes:
        name: Phase, victims and degrees.
        degrees: Of the replicas.
        faults: Text of the fault plan.
        dead: Seats that die.
        loading: Seats that die while they load data, and at which sample.
        num_workers: DataLoader workers.
    """

    name: str
    degrees: tuple[int, ...]
    faults: str
    dead: tuple[str, ...]
    loading: tuple[tuple[str, int], ...] = ()
    num_workers: int = 0

    @property
    def trial(self) -> Trial:
        data = partial(deadly_loader, victims=self.loading, num_workers=self.num_workers)
        return Trial(replace(scenario_of(self.degrees), data=data), self.faults, checkpoints=True)


def scenario_of(degrees: tuple[int, ...]) -> Scenario:
    """Accumulation of 3, clipping, a learning rate that changes, a partial last window; thin replicas stay."""
    return Scenario(
        module=Scheduled,
        degrees=degrees,
        size=(WINDOWS - 1) * 12 + 4,
        batch_size=2,
        accumulate=3,
        trainer={"gradient_clip_val": 1.0, "max_epochs": EPOCHS},
        config=MODEL,
        strategy={"min_tensor_parallel_size": 1},
    )


def table() -> dict[str, Row]:
    """All rows by name."""
    rows = [row for degrees in DEGREES for row in _rows(degrees)]
    return {row.name: row for row in rows}


def victims_of(degrees: tuple[int, ...]) -> dict[str, tuple[str, ...]]:
    return {"rank 0": ("r0.s0",), "middle": ("r0.s1",), "last": (f"r1.s{degrees[1] - 1}",), "two": PAIR}


def _rows(degrees: tuple[int, ...]) -> Iterator[Row]:
    shown = f"{degrees[0]}+{degrees[1]}"
    for who, victims in victims_of(degrees).items():
        for phase, (step, moment) in ANYBODY.items():
            yield Row(f"{phase}, {who}, {shown}", degrees, _kills(victims, step, moment), victims)
        for num_workers, loader in ((0, "the process"), (2, "a worker")):
            loading = tuple((seat, 5 if num_workers else 9) for seat in victims)
            yield Row(f"loading by {loader}, {who}, {shown}", degrees, "", victims, loading, num_workers)
        yield _in_recovery(degrees, who, victims, shown)
        yield from _reshards(degrees, who, victims, shown)
    yield from _leader_legs(degrees, shown)


def _kills(victims: tuple[str, ...], step: int, moment: str) -> str:
    return ", ".join(f"kill {seat}@{step}:{moment}" for seat in victims)


def _in_recovery(degrees: tuple[int, ...], who: str, victims: tuple[str, ...], shown: str) -> Row:
    first, dead = "raise r0.s1@2:data_parallel", victims
    if (degrees, who) in FIRST_BEFORE:
        before = FIRST_BEFORE[degrees, who]
        first, dead = f"kill {before}@{STEP}:vote", (before, *victims)
    return Row(f"recovery, {who}, {shown}", degrees, f"{first}, {_kills(victims, STEP, 'change')}", dead)


def _reshards(degrees: tuple[int, ...], who: str, victims: tuple[str, ...], shown: str) -> Iterator[Row]:
    """Only unequal replicas reshard, so one of equal ones is made thinner before."""
    is_equal = degrees[0] == degrees[1]
    before, dead = (f"kill r1.s2@{STEP - 1}, ", ("r1.s2",)) if is_equal else ("", ())
    if who == "last":
        victims = ("r0.s2",)  # that slot sums nothing, it only gives and gets
    for phase, moment in RESHARDS.items():
        yield Row(f"{phase}, {who}, {shown}", degrees, before + _kills(victims, STEP, moment), (*dead, *victims))


def _leader_legs(degrees: tuple[int, ...], shown: str) -> Iterator[Row]:
    """The middle leg of the vote is for the first slots alone."""
    for who, seat in (("rank 0", "r0.s0"), ("the other first slot", "r1.s0")):
        kill = f"kill {seat}@{STEP}:leader_control"
        yield Row(f"vote, middle leg, {who}, {shown}", degrees, kill, (seat,))
        yield Row(
            f"vote, middle leg, {who} and one in the last leg, {shown}", degrees,
            f"{kill}, kill {_partner(seat)}@{STEP}:replica_control#2", (seat, _partner(seat)),
        )  # fmt: skip


def _partner(seat: str) -> str:
    return "r1.s1" if seat == "r0.s0" else "r0.s1"
