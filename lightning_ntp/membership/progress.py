"""Who is to blame when nobody gets on: the member that is *not* in a collective in which others wait.

Being alive says little: a member whose main thread is stuck gives signs of life for ever. So each also says where it
is, and whoever watches times how long that has not changed, by its own clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_ntp.comm.progress import Progress
from lightning_ntp.config import Timeouts
from lightning_ntp.errors import MembershipError
from lightning_ntp.membership.parse import Fields
from lightning_ntp.topology import Seat

STEP_PHASES = frozenset({"forward", "backward", "sync", "vote", "step"})
"""Phases inside a step; all others have the longer limit."""

AGREEING = "agree"
"""Phase of a member that is out of all collectives and waits for the next view. Agreement has a limit of its own."""


@dataclass(frozen=True)
class Record:
    """A member's word on where it is; see :class:`Progress`."""

    generation: int
    step: int
    phase: str
    waiting: tuple[tuple[str, int], ...]
    left: int

    @classmethod
    def of(cls, progress: Progress) -> Record:
        waiting = tuple(sorted(progress.waiting.copy().items()))  # the copy is atomic, an iteration would not be
        return cls(progress.generation, progress.step, progress.phase, waiting, progress.left)

    def to_json(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "step": self.step,
            "phase": self.phase,
            "waiting": dict(self.waiting),
            "left": self.left,
        }

    @classmethod
    def from_json(cls, data: Any) -> Record:
        """Read :meth:`to_json`.

        Raises:
            MembershipError: if it is anything else.
        """
        fields = Fields("progress", data)
        waiting = fields.take("waiting", dict)
        if not all(isinstance(number, int) for number in waiting.values()):
            raise MembershipError("progress: waiting must map channels to numbers")
        record = cls(
            fields.number("generation", at_least=-1),
            fields.number("step", at_least=-1),
            fields.take("phase", str)[:40],
            tuple(sorted(waiting.items())),
            fields.number("left", at_least=0),
        )
        fields.finish()
        return record


@dataclass(frozen=True)
class Observed:
    """A record, and for how long it has been the same."""

    record: Record
    age_s: float


@dataclass(frozen=True)
class Hang:
    """Nobody gets on.

    Attributes:
        culprits: Members that others wait for; empty if all wait for each other (collectives that do not match).
        text: For the reader.
    """

    culprits: tuple[Seat, ...]
    text: str


def find_hang(observed: Mapping[Seat, Observed], timeouts: Timeouts) -> Hang | None:
    """Look for a hang among the members of one view.

    Args:
        observed: All live members' records; those of an older generation are on their way and no evidence.
        timeouts: ``hang_s`` counts for a member that is in a step, ``slow_hang_s`` for others.

    Returns:
        ``None`` while somebody may still get on.
    """
    newest = max((entry.record.generation for entry in observed.values()), default=-1)
    present = {seat: entry for seat, entry in observed.items() if entry.record.generation == newest}
    if any(entry.record.phase == AGREEING for entry in present.values()):
        return None  # the generation is over: who does not come out is late, and no longer a matter of hangs
    waiting = {seat: entry for seat, entry in present.items() if entry.record.waiting}
    away = {seat: entry for seat, entry in present.items() if not entry.record.waiting}
    stuck = [seat for seat, entry in waiting.items() if entry.age_s > timeouts.hang_s]
    if not stuck:
        return None
    if away:
        late = {seat: entry for seat, entry in away.items() if entry.age_s > _limit_s(entry.record, timeouts)}
        if not late:
            return None
        text = "; ".join(f"{seat} in {entry.record.phase!r} for {entry.age_s:.1f} s" for seat, entry in late.items())
        return Hang(tuple(sorted(late)), f"{len(stuck)} members wait in collectives for {text}")
    if len(stuck) == len(present):
        where = "; ".join(f"{seat}: {dict(entry.record.waiting)}" for seat, entry in sorted(waiting.items()))
        return Hang((), f"all members wait, in collectives that do not match: {where}")
    return None


def _limit_s(record: Record, timeouts: Timeouts) -> float:
    return timeouts.hang_s if record.phase in STEP_PHASES else timeouts.slow_hang_s
