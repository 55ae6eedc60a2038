"""A model small enough to be checked in closed form: one sharded fp64 parameter, its gradient a known function of the
step.

Weights after ``n`` steps are ``-LR * sum_t g_t / |g_t|``. The norm travels in the vote, so a vote with a wrong content,
a step taken twice or not at all, a gradient from the wrong view or a unit from the wrong source all end in wrong
weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ntp.comm.exchange import Exchange
from lightning_ntp.errors import ShardsLost
from lightning_ntp.layout import Holder, LayoutFamily, Segment, Sharded, Transfer, plan_transfer
from lightning_ntp.membership.view import View
from lightning_ntp.topology import Seat

NUM_UNITS, ROWS, DEGREE, LR = 28, 30, 4, 1e-3
LAYOUT = Sharded(0, (Segment(LayoutFamily(NUM_UNITS, DEGREE), (ROWS,) * NUM_UNITS),))

Place = tuple[int, int, int]
"""(replica number, degree, slot): whose layout a shard has."""


def place_of(view: View, seat: Seat) -> Place:
    replica, slot = view.topology.place(view.rank(seat))
    return seat.replica, view.topology.degrees[replica], slot


def rows_of(place: Place) -> Tensor:
    """Dense rows of a shard, in local order."""
    pieces = LAYOUT.pieces(place[1], place[2])
    return torch.cat([torch.arange(p.dense_row, p.dense_row + p.rows) for p in pieces] or [torch.arange(0)])


def gradient(step: int) -> Tensor:
    return torch.sin(torch.arange(LAYOUT.extent, dtype=torch.float64) * 0.7 + step)


def expected_weights(num_steps: int) -> Tensor:
    total = torch.zeros(LAYOUT.extent, dtype=torch.float64)
    for step in range(num_steps):
        grad = gradient(step)
        total -= LR * grad / grad.norm()
    return total


def wrong_by(weights: Tensor, place: Place, num_steps: int) -> float:
    """Largest error of a shard, relative to the largest weight."""
    expected = expected_weights(num_steps)
    if not weights.numel():
        return 0.0
    return float((weights - expected[rows_of(place)]).abs().max() / expected.abs().max())


@dataclass
class Shard:
    """What one member holds.

    ``base`` is the shard of the last committed view; it stays until a step is committed in the new one, where the
    member holds ``new``. So a second failure in the middle of a move loses nothing.

    Attributes:
        base: Place and weights.
        new: The same in the view that no step was committed in yet.
        moved_at: The committed step when ``new`` was made.
    """

    base: tuple[Place, Tensor] | None
    new: tuple[Place, Tensor] | None = None
    moved_at: int = -1

    @property
    def current(self) -> tuple[Place, Tensor]:
        return self.new or self.base

    def tag(self) -> list | None:
        """For the join record: [base place, new place or None, moved_at]."""
        return None if self.base is None else [self.base[0], self.new and self.new[0], self.moved_at]

    def settle(self, step: int) -> None:
        """Keep the one shard that counts once ``step`` is the committed one."""
        if self.new is not None and step > self.moved_at:
            self.base = self.new
        self.new = None

    def apply(self, grad: Tensor, norm: float) -> None:
        """One optimizer step on the current shard."""
        place, weights = self.current
        self.base, self.new = (place, weights - LR * grad / norm), None


def place_in(tag: list, step: int) -> Place:
    """The place at which a member holds its shard, from its tag, if ``step`` is the committed one."""
    base, new, moved_at = tag
    return tuple(new if new is not None and step > moved_at else base)


def plan(view: View) -> Transfer:
    """Who sends what in a new view; members are named by rank.

    Raises:
        ShardsLost: if some rows are held by no member of the view.
    """
    before = []
    for seat, tag in view.holdings.items():
        if tag is not None:
            before.append(Holder(view.rank(seat), *place_in(tag, view.step)))
    after = [Holder(rank, *place_of(view, seat)) for rank, seat in enumerate(view.members)]
    transfer = plan_transfer(LAYOUT, before, after)
    if transfer.lost:
        raise ShardsLost(f"rows {transfer.lost} are held by no member of generation {view.generation}")
    return transfer


def move(view: View, seat: Seat, held: Tensor | None, control: Exchange) -> Tensor:
    """This member's weights in the new view."""
    transfer, me = plan(view), view.rank(seat)
    wanted = torch.zeros(LAYOUT.local_extent(*place_of(view, seat)[1:]), dtype=torch.float64)
    for old_row, new_row, rows in transfer.kept[me]:
        wanted[new_row : new_row + rows] = held[old_row : old_row + rows]
    ranks = range(len(view.members))
    outgoing = [[s for s in transfer.slices if (s.source, s.target) == (me, rank)] for rank in ranks]
    incoming = [[s for s in transfer.slices if (s.source, s.target) == (rank, me)] for rank in ranks]
    pieces = [held[s.source_row : s.source_row + s.rows] for slices in outgoing for s in slices]
    send = torch.cat(pieces) if pieces else wanted.new_zeros(0)
    got = control.all_to_all(send, [_rows(slices) for slices in outgoing], [_rows(slices) for slices in incoming])
    start = 0
    for piece in (s for slices in incoming for s in slices):
        wanted[piece.target_row : piece.target_row + piece.rows] = got[start : start + piece.rows]
        start += piece.rows
    return wanted


def _rows(slices: Sequence) -> int:
    return sum(piece.rows for piece in slices)


def part_of_norm(view: View, seat: Seat, grad: Tensor | None) -> float:
    """This member's part of the squared norm of the gradient of ``view.step``: each unit counted by its first
    holder."""
    counted: set[int] = set()
    for other in view.members:
        tag = view.holdings.get(other)
        if tag is None:
            continue
        place = place_in(tag, view.step)
        mine = [piece for piece in LAYOUT.pieces(*place[1:]) if piece.unit not in counted]
        if other == seat:
            return sum(float(grad[p.local_row : p.local_row + p.rows].square().sum()) for p in mine)
        counted |= {piece.unit for piece in mine}
    return 0.0


def uncovered(holdings: Mapping[str, list | None], step: int) -> set[int]:
    """Units that no holder has; from a logged view, independently of :func:`plan`."""
    held = {
        unit
        for tag in holdings.values()
        if tag is not None
        for unit in LAYOUT.segments[0].family.at(place_in(tag, step)[1]).slots[place_in(tag, step)[2]]
    }
    return set(range(NUM_UNITS)) - held
