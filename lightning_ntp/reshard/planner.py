"""Which rows of each parameter go from whom to whom, when members with some holdings take new places.

Every member computes the same from what all have told: nothing of it travels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_ntp.layout import Holder, ParameterLayout, Replicated, Slice, Transfer, plan_transfer
from lightning_ntp.reshard.place import PeerState, Place

# A member's second, third ... holding of a parameter is planned as if another member of its replica had it.
HOLDINGS = 8
# Of equally good sources the first is taken, so parameters of one layout look at them in different orders: one for each
# replica in front. Each order is planned anew, and with many replicas a parameter's own units spread over them anyway.
_MANY_REPLICAS = 8

_Holdings = tuple[tuple[Place, ...], ...]  # by rank, of one parameter


@dataclass(frozen=True)
class Leg:
    """Rows of one parameter that a member copies from one of another's holdings, or of its own older ones.

    Attributes:
        source: Rank of the member that has them.
        holding: Which of its holdings; 0 is the current one.
        target: Rank of the member that wants them.
    """

    source: int
    holding: int
    target: int
    source_row: int
    target_row: int
    rows: int


@dataclass(frozen=True)
class ParameterMove:
    """How one parameter gets to its new places.

    Attributes:
        legs: What is copied.
        kept: By rank, (old row, new row, rows) that a member has in its current part.
        is_lost: Some rows have no holder.
    """

    legs: tuple[Leg, ...]
    kept: Mapping[int, tuple[tuple[int, int, int], ...]]
    is_lost: bool

    @property
    def crosses(self) -> bool:
        """Whether anything goes from one member to another."""
        return any(leg.source != leg.target for leg in self.legs)


class Planner:
    """The moves of all parameters between two views.

    Args:
        peers: All members that take part, in group order.
    """

    def __init__(self, peers: Sequence[PeerState]) -> None:
        self._peers = list(peers)
        self._givers = sorted({peer.replica for peer in peers if peer.held}) or [0]
        count = len(self._givers)
        self._orders = [self._order(first) for first in (range(count) if count <= _MANY_REPLICAS else (0, count // 2))]
        self._holdings: _Holdings = ()
        self._turns: Counter[ParameterLayout] = Counter()
        self._moves: dict[tuple[ParameterLayout, int], ParameterMove] = {}

    @property
    def num_replicas(self) -> int:
        """Replicas of the new view; each holds the whole model once the move is over."""
        return len({peer.target.replica for peer in self._peers if peer.target is not None})

    def move(self, layout: ParameterLayout, index: int) -> ParameterMove:
        """The move of parameter ``index``, which lies as ``layout`` says. To be asked for in order."""
        held = tuple(peer.holdings(index)[:HOLDINGS] for peer in self._peers)
        if held != self._holdings:  # mostly those of the parameter before, whose plan then holds for equal layouts
            self._holdings = held
            self._moves.clear()
        turn = self._turns[layout]
        self._turns[layout] += 1
        key = layout, turn if isinstance(layout, Replicated) else turn % len(self._orders)
        if key not in self._moves:
            self._moves[key] = self._plan(layout, held, turn)
        return self._moves[key]

    def _plan(self, layout: ParameterLayout, held: _Holdings, turn: int) -> ParameterMove:
        order = self._orders[turn % len(self._orders)]
        position = {rank: at for at, rank in enumerate(order)}
        before = tuple(
            Holder(position[rank] * HOLDINGS + number, place.replica, place.degree, place.slot)
            for rank, places in enumerate(held)
            for number, place in enumerate(places)
        )
        after = tuple(
            Holder(position[rank] * HOLDINGS, peer.target.replica, peer.target.degree, peer.target.slot)
            for rank, peer in enumerate(self._peers)
            if peer.target is not None
        )
        if isinstance(layout, Replicated):
            return _in_ranks(_plan_replicated(before, after, turn), order)
        return _in_ranks(plan_transfer(layout, before, after), order)

    def _order(self, first: int) -> list[int]:
        """The ranks, by replica, beginning with the giver at position ``first``."""
        count = len(self._givers)
        at = {replica: (number - first) % count for number, replica in enumerate(self._givers)}
        return sorted(range(len(self._peers)), key=lambda rank: (at.get(self._peers[rank].replica, count), rank))


def _in_ranks(transfer: Transfer, order: Sequence[int]) -> ParameterMove:
    legs = tuple(
        Leg(
            order[piece.source // HOLDINGS],
            piece.source % HOLDINGS,
            order[piece.target // HOLDINGS],
            piece.source_row,
            piece.target_row,
            piece.rows,
        )
        for piece in transfer.slices
    )
    kept = {order[member // HOLDINGS]: runs for member, runs in transfer.kept.items()}
    return ParameterMove(legs, kept, bool(transfer.lost))


def _plan_replicated(before: tuple[Holder, ...], after: tuple[Holder, ...], turn: int) -> Transfer:
    """A whole copy is one row: only who has none needs it. Everybody gives in turn."""
    have = {holder.member for holder in before}
    kept = {target.member: ((0, 0, 1),) for target in after if target.member in have}
    needy, slices = [target for target in after if target.member not in have], []
    for number, target in enumerate(needy if before else ()):
        near = [holder.member for holder in before if holder.replica == target.replica]
        sources = near or [holder.member for holder in before]
        slices.append(Slice(sources[(turn * len(needy) + number) % len(sources)], target.member, 0, 0, 1))
    return Transfer(tuple(slices), kept, ((0, 1),) if not before else ())
