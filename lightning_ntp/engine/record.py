"""What a member tells the others of itself when it leaves a generation: the view hands it to all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_ntp.membership.parse import Fields
from lightning_ntp.membership.view import View
from lightning_ntp.reshard import Held, PeerState, Place, held_from_json, held_to_json
from lightning_ntp.topology import Seat


@dataclass(frozen=True)
class Record:
    """How far a member is besides its steps, and what it holds.

    Attributes:
        held: For each parameter the places whose parts it holds.
        outside: Collectives outside the steps that it is through with.
        evaluated: Evaluation steps that it is through with.
        splits: How often its replica has halved the passes of a micro-batch, for want of memory.
        gives_up: Whether it cannot go on at this degree, for want of memory.
        lacks_dowry: A joiner that has not been told yet what the others know.
    """

    held: Held = ()
    outside: int = 0
    evaluated: int = 0
    splits: int = 0
    gives_up: bool = False
    lacks_dowry: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "held": held_to_json(self.held),
            "outside": self.outside,
            "evaluated": self.evaluated,
            "splits": self.splits,
            "gives_up": self.gives_up,
            "lacks_dowry": self.lacks_dowry,
        }

    @classmethod
    def from_json(cls, data: Any) -> Record:
        """Read :meth:`to_json`; ``None`` is a joiner, who holds nothing.

        Raises:
            MembershipError: if it is anything else.
        """
        if data is None:
            return cls(lacks_dowry=True)
        fields = Fields("record", data)
        record = cls(
            held_from_json(fields.take("held", list)),
            fields.number("outside", 0),
            fields.number("evaluated", 0),
            fields.number("splits", 0),
            fields.take("gives_up", bool),
            fields.take("lacks_dowry", bool),
        )
        fields.finish()
        return record


def holdings_of(view: View, seat: Seat) -> Record:
    """What a member told before ``view`` was made."""
    return Record.from_json(view.holdings.get(seat))


def place_of(view: View, seat: Seat) -> Place:
    """Where a view puts a member."""
    replica, slot = view.topology.place(view.rank(seat))
    return Place(seat.replica, view.topology.degrees[replica], slot)


def peer_states(view: View) -> list[PeerState]:
    """What each member holds and where it goes, in rank order."""
    return [PeerState(holdings_of(view, seat).held, place_of(view, seat)) for seat in view.members]
