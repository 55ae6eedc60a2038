"""The view: the agreed set of live members, where each of them sits, and the step that is committed.

Members that hold the same view act alike without another word, so a view is a frozen value, and what is read from the
store is checked in every field before it becomes one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lightning_ntp.errors import MembershipError
from lightning_ntp.membership.parse import Fields, parse_seat
from lightning_ntp.topology import Seat, Topology

Replicas = tuple[tuple[Seat, ...], ...]


@dataclass(frozen=True)
class View:
    """What all members of a generation know.

    Attributes:
        generation: Counts the views of a job; -1 is the view that the launcher founds, before anybody has joined.
        nominal_degree: Degree of a replica in which nothing has failed.
        seats: For each live replica the seats of its members, in slot order.
        step: The last committed step: every member applies it, nobody beyond. -1 before the first.
        joined: Generation in which each seat joined.
        incarnations: Which process sits at each seat: 0, and one more each time that it was started again.
        vote: Result of the vote on ``step``, if a member of this view has it; else the members compute it anew.
        holdings: For each veteran the tag of the layout in which it holds its shards, as it said when it joined.
        events: Events of the log that this view knows of.
        fruitless: How many generations in a row have ended before this one without a death and without a step.
    """

    generation: int
    nominal_degree: int
    seats: Replicas
    step: int = -1
    joined: Mapping[Seat, int] = field(default_factory=dict)
    incarnations: Mapping[Seat, int] = field(default_factory=dict)
    vote: Mapping[str, Any] | None = None
    holdings: Mapping[Seat, Any] = field(default_factory=dict)
    events: int = 0
    fruitless: int = 0

    def __post_init__(self) -> None:
        members = self.members
        if len(set(members)) != len(members) or not members or any(not replica for replica in self.seats):
            raise MembershipError(f"a view must hold each seat once and no empty replica: {_shown(self.seats)}")
        for replica in self.seats:
            if len({seat.replica for seat in replica}) != 1 or len(replica) > self.nominal_degree:
                raise MembershipError(
                    f"the seats of one replica belong together, at most {self.nominal_degree}: {_shown([replica])}"
                )
        for name in ("joined", "incarnations"):
            if set(getattr(self, name)) != set(members):
                raise MembershipError(f"a view needs {name} of exactly its members {_shown(self.seats)}")

    @classmethod
    def founding(cls, topology: Topology) -> View:
        """The view before the first: the members that the launcher starts."""
        zeros = dict.fromkeys(topology.members, 0)
        return cls(-1, topology.nominal_degree, topology.seats, joined=zeros, incarnations=zeros)

    @cached_property
    def members(self) -> tuple[Seat, ...]:
        """Seats in rank order: replica by replica, slot by slot."""
        return tuple(seat for replica in self.seats for seat in replica)

    @cached_property
    def topology(self) -> Topology:
        speakers = tuple(min(replica, key=lambda seat: (self.joined[seat], seat)) for replica in self.seats)
        return Topology(self.nominal_degree, self.seats, self.leader, speakers)

    @property
    def leader(self) -> Seat:
        """The member with the rank-zero duties: who joined earliest, the lowest seat among equals."""
        return min(self.members, key=lambda seat: (self.joined[seat], seat))

    def rank(self, seat: Seat) -> int:
        """Rank of a seat.

        Raises:
            MembershipError: if no member of this view sits there.
        """
        if seat not in self.members:
            raise MembershipError(f"{seat} is not in the view of generation {self.generation}: {_shown(self.seats)}")
        return self.members.index(seat)

    def to_json(self) -> dict[str, Any]:
        """Plain data; :meth:`from_json` reads it."""
        return {
            "generation": self.generation,
            "nominal_degree": self.nominal_degree,
            "seats": [[str(seat) for seat in replica] for replica in self.seats],
            "step": self.step,
            "joined": {str(seat): number for seat, number in self.joined.items()},
            "incarnations": {str(seat): number for seat, number in self.incarnations.items()},
            "vote": None if self.vote is None else dict(self.vote),
            "holdings": {str(seat): tag for seat, tag in self.holdings.items()},
            "events": self.events,
            "fruitless": self.fruitless,
        }

    @classmethod
    def from_json(cls, data: Any) -> View:
        """Read :meth:`to_json`.

        Raises:
            MembershipError: if anything is missing, unknown, of another type or out of range.
        """
        fields = Fields("view", data)
        replicas = fields.take("seats", list)
        if not all(isinstance(replica, list) for replica in replicas):
            raise MembershipError("view: seats must be a list of lists")
        view = cls(
            generation=fields.number("generation", at_least=0),
            nominal_degree=fields.number("nominal_degree", at_least=1),
            seats=tuple(tuple(parse_seat(name) for name in replica) for replica in replicas),
            step=fields.number("step", at_least=-1),
            joined=fields.seats("joined", int),
            incarnations=fields.seats("incarnations", int),
            vote=fields.take("vote", dict, optional=True),
            holdings=fields.seats("holdings", object),
            events=fields.number("events", at_least=0),
            fruitless=fields.number("fruitless", at_least=0),
        )
        fields.finish()
        return view


def reseat(seats: Replicas, gone: Collection[Seat], joiners: Sequence[Seat] = ()) -> Replicas:
    """Slots after deaths and joins.

    With m survivors in a replica, those in slots below m stay; those in slots at or above m fill the dead slots, in
    ascending order. A joiner gets the next slot. So a replica's layout depends on its degree alone, and only who sat
    at or above m moves. A replica without members vanishes; one that comes back is put in its place by number.

    Args:
        seats: For each replica the seats in slot order.
        gone: Seats to leave out.
        joiners: Seats to add, in this order.
    """
    shrunk = [_close_gaps(replica, gone) for replica in seats]
    by_number = {replica[0].replica: list(replica) for replica in shrunk if replica}
    for seat in joiners:
        by_number.setdefault(seat.replica, []).append(seat)
    return tuple(tuple(by_number[number]) for number in sorted(by_number))


def _close_gaps(replica: tuple[Seat, ...], gone: Collection[Seat]) -> tuple[Seat, ...]:
    degree = sum(seat not in gone for seat in replica)
    movers = iter([seat for seat in replica[degree:] if seat not in gone])
    return tuple(next(movers) if seat in gone else seat for seat in replica[:degree])


def _shown(seats: Sequence[Sequence[Seat]]) -> str:
    return " | ".join(" ".join(map(str, replica)) for replica in seats)
