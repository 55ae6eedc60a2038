"""What the members of a view decide when it ends; pure functions of the same records on all of them.

Each survivor says how far it is: ``arrived`` (it holds the complete gradients of that step) and ``applied`` (the
optimizer has taken it). A step counts as committed for all as soon as it may have been applied anywhere. Nobody applies
step t before the vote on t, and passing the vote means that all had arrived at t. So

    ``c = min(arrived)`` over the survivors is at least ``max(applied)``:

everyone who has not applied c still holds the gradients for it, and nothing is ever undone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_ntp.errors import MembershipError
from lightning_ntp.membership.events import Facts
from lightning_ntp.membership.parse import Fields
from lightning_ntp.membership.view import Replicas, View, reseat
from lightning_ntp.topology import Seat

MAX_FRUITLESS = 3
"""Generations in a row that may end without a death and without a step before the late member has to go."""


@dataclass(frozen=True)
class Standing:
    """How far a member is; the body of its join record.

    Attributes:
        arrived: The last step whose complete gradients it holds or has applied; -1 before the first.
        applied: The last step that its optimizer has taken.
        vote: The vote that it passed last: ``{"step": t, ...}`` with whatever the engine needs to finish step t.
        holdings: Tag of the layout in which it holds its shards (plain data).
        fresh: A joiner: it holds nothing and has no say in the step.
        incarnation: Which process at its seat.
        took_s: How long it took to get out of its collectives, in seconds.
        admits: Whether it is where a joiner can be let in.
    """

    arrived: int = -1
    applied: int = -1
    vote: Mapping[str, Any] | None = None
    holdings: Any = None
    fresh: bool = False
    incarnation: int = 0
    took_s: float = 0.0
    admits: bool = True

    def to_json(self) -> dict[str, Any]:
        return {
            "arrived": self.arrived,
            "applied": self.applied,
            "vote": None if self.vote is None else dict(self.vote),
            "holdings": self.holdings,
            "fresh": self.fresh,
            "incarnation": self.incarnation,
            "took_ms": int(self.took_s * 1000),
            "admits": self.admits,
        }

    @classmethod
    def from_json(cls, data: Any) -> Standing:
        """Read :meth:`to_json`.

        Raises:
            MembershipError: if it is anything else.
        """
        fields = Fields("join", data)
        arrived, applied = fields.number("arrived", -1), fields.number("applied", -1)
        vote = fields.take("vote", dict, optional=True)
        if arrived < applied or (vote is not None and not isinstance(vote.get("step"), int)):
            raise MembershipError(f"join: arrived={arrived} is before applied={applied}, or the vote names no step")
        standing = cls(
            arrived,
            applied,
            vote,
            fields.take("holdings", object, optional=True),
            fields.take("fresh", bool),
            fields.number("incarnation", 0),
            fields.number("took_ms", 0) / 1000,
            fields.take("admits", bool),
        )
        fields.finish()
        return standing


def committed_step(veterans: Mapping[Seat, Standing]) -> int:
    """The step that the new view commits.

    Raises:
        MembershipError: if some member has applied a step at which another has not arrived: then the commit rule is
        broken.
    """
    step = min(standing.arrived for standing in veterans.values())
    ahead = [f"{seat} has applied {s.applied}" for seat, s in veterans.items() if s.applied > step]
    if ahead:
        raise MembershipError(f"step {step} would be committed, but {', '.join(ahead)}: applied without a vote")
    return step


def next_view(
    before: View,
    veterans: Mapping[Seat, Standing],
    joiners: Mapping[Seat, Standing],
    events: int,
) -> View:
    """The view that follows ``before``.

    Args:
        before: The view that has ended.
        veterans: Its members that live and have joined.
        joiners: Newcomers to admit; none of their seats is a veteran's.
        events: Position in the log up to which deaths are known.
    """
    gone = [seat for seat in before.members if seat not in veterans]
    seats = reseat(before.seats, gone, sorted(joiners))
    generation = before.generation + 1
    step = committed_step(veterans)
    votes = [s.vote for s in veterans.values() if s.vote is not None and s.vote["step"] == step]
    same = not gone and not joiners and step == before.step and before.generation >= 0
    return View(
        generation,
        before.nominal_degree,
        seats,
        step=step,
        joined={**{seat: before.joined[seat] for seat in veterans}, **dict.fromkeys(joiners, generation)},
        incarnations={seat: standing.incarnation for seat, standing in (*veterans.items(), *joiners.items())},
        vote=votes[0] if votes else None,
        holdings={seat: standing.holdings for seat, standing in veterans.items()},
        events=events,
        fruitless=before.fruitless + 1 if same else 0,
    )


def admissible(seats: Replicas, facts: Facts, lowest_degree: int) -> dict[Seat, int]:
    """Joiners that can be let in now, with their incarnation.

    A replica comes back at once with as many members as it needs; one that falls short of ``lowest_degree`` would have
    to retire at the next step.

    Args:
        seats: Of the members that stay, by replica.
        facts: Who waits, and who is gone.
        lowest_degree: The lowest degree that a replica may have.
    """
    taken = {seat for replica in seats for seat in replica}
    waiting = {s: n for s, n in facts.waiting.items() if s not in taken and (s, n) not in facts.gone}
    degrees = Counter(seat.replica for seat in (*taken, *waiting))
    return {seat: number for seat, number in waiting.items() if degrees[seat.replica] >= lowest_degree}


def late_member(before: View, veterans: Mapping[Seat, Standing], noticeable_s: float) -> Seat | None:
    """Who is to be expelled, as view after view ends without a death and without a step: the last one to come out.

    Returns:
        ``None`` if it is not time yet.

    Raises:
        MembershipError: if it is time, but nobody was noticeably late, so that nobody can be blamed.
    """
    if before.fruitless < MAX_FRUITLESS:
        return None
    by_delay = sorted(veterans, key=lambda seat: veterans[seat].took_s)
    if len(by_delay) > 1 and veterans[by_delay[-1]].took_s > veterans[by_delay[-2]].took_s + noticeable_s:
        return by_delay[-1]
    raise MembershipError(
        f"{before.fruitless} generations in a row ended without a death and without a step, and no member was later "
        "than the others: collectives fail for a reason of their own, see the errors above"
    )
