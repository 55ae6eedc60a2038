"""Where the parts of the parameters are held, and what a member tells the others of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_ntp.errors import MembershipError


@dataclass(frozen=True)
class Place:
    """A slot of a replica of some degree."""

    replica: int
    degree: int
    slot: int


Held = tuple[tuple[Place, ...], ...]


@dataclass(frozen=True)
class PeerState:
    """What one member of a move holds, and where it goes.

    Attributes:
        held: For each parameter the places whose parts it holds, the current one first; empty for a joiner.
        target: Its place in the new view; ``None`` for one that leaves and only hands over.
    """

    held: Held
    target: Place | None

    def holdings(self, index: int) -> tuple[Place, ...]:
        """The places whose parts of a parameter it holds, the current one first."""
        return self.held[index] if self.held else ()

    @property
    def replica(self) -> int:
        """The replica that it belongs to."""
        if self.target is not None:
            return self.target.replica
        return next((places[0].replica for places in self.held if places), -1)


def held_to_json(held: Held) -> list[list[Any]]:
    """What a member holds, as plain data: runs of parameters that are held at the same places."""
    runs: list[list[Any]] = []
    for places in held:
        tag = [[place.replica, place.degree, place.slot] for place in places]
        if runs and runs[-1][1] == tag:
            runs[-1][0] += 1
        else:
            runs.append([1, tag])
    return runs


def held_from_json(data: Any) -> Held:
    """Read ``held_to_json``; ``None`` is a joiner, who holds nothing.

    Raises:
        MembershipError: if it is anything else.
    """
    try:
        runs = [(int(count), tuple(Place(*map(int, place)) for place in tag)) for count, tag in data or ()]
        return tuple(places for count, places in runs for _ in range(count))
    except (TypeError, ValueError) as error:
        raise MembershipError(f"a member's record of its shards cannot be read: {data!r}: {error}") from None
