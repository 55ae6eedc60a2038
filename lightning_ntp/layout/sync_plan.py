"""The gradient sync of one bucket as data: what every slot gives, takes and keeps between compute and sync layout.

A replica computes at its own degree; gradients are summed over the replicas at the *sync degree*, the lowest of all. In
between, inside each replica, units travel from the slots that computed them to the slot that owns their sum (before the
sum), and back to every slot that holds them (after it). The sync buffer of a slot lists the units that it owns, each
contiguous, in an order that depends on the sync degree alone: so slot s of every replica has the same buffer.

Pure: no torch, no processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lightning_ntp.layout.family import Layout
from lightning_ntp.layout.shard import ParameterLayout, Replicated


@dataclass(frozen=True)
class Entry:
    """One parameter of a bucket: its layout, and the numbers of one row of it.

    Attributes:
        layout: Replicated or sharded.
        row_numel: Elements of a row: dense elements over rows of the sharded dimension. For a replicated parameter all
            of its elements (it counts as one row).
    """

    layout: ParameterLayout
    row_numel: int


@dataclass(frozen=True)
class Move:
    """Rows of a local gradient, and where they lie in their owner's sync buffer."""

    param: int
    row: int
    rows: int
    offset: int
    numel: int

    def joins(self, following: Move) -> bool:
        """Whether ``following`` continues this one in the gradient and in the buffer."""
        return (
            self.param == following.param
            and self.row + self.rows == following.row
            and self.offset + self.numel == following.offset
        )


Moves = tuple[Move, ...]


@dataclass
class SlotSync:
    """What one slot does for one bucket.

    Attributes:
        keep: Own gradient rows that count in the slot's own sum.
        restore: Rows of the own sum that the slot's own gradient gets back.
        give: For each slot, own rows that travel there before the sum.
        take: For each slot, what comes from there before the sum (added; ``row`` is meaningless here).
        hand: For each slot, what the sum's owner sends there after the sum.
        get: For each slot, own rows that come from there after the sum.
        numel: Elements of the slot's sync buffer.
    """

    keep: Moves = ()
    restore: Moves = ()
    give: tuple[Moves, ...] = ()
    take: tuple[Moves, ...] = ()
    hand: tuple[Moves, ...] = ()
    get: tuple[Moves, ...] = ()
    numel: int = 0


@dataclass
class _Draft:
    """Moves of all slots while a plan is built: lists indexed [from slot][to slot]."""

    degree: int
    before: list[list[list[Move]]] = field(init=False)
    after: list[list[list[Move]]] = field(init=False)

    def __post_init__(self) -> None:
        self.before, self.after = (
            [[[] for _ in range(self.degree)] for _ in range(self.degree)] for _ in range(2)
        )


@dataclass(frozen=True)
class SyncPlan:
    """The sync of one bucket inside a replica of ``degree``, at ``sync_degree``."""

    degree: int
    sync_degree: int
    slots: tuple[SlotSync, ...]

    @cached_property
    def has_pre(self) -> bool:
        """Whether anything travels inside the replica before the sum."""
        return any(moves for slot in self.slots for moves in slot.give)

    @cached_property
    def has_post(self) -> bool:
        """Whether anything travels inside the replica after the sum."""
        return any(moves for slot in self.slots for moves in slot.hand)

    @property
    def is_trivial(self) -> bool:
        return not (self.has_pre or self.has_post)


def plan_sync(entries: Sequence[Entry], degree: int, sync_degree: int, owner: int = 0) -> SyncPlan:
    """Plan the sync of a bucket.

    Args:
        entries: The bucket's parameters.
        degree: Degree of the replica.
        sync_degree: Lowest degree of all replicas.
        owner: The slot that sums this bucket's replicated parameters.
    """
    draft, offsets = _Draft(degree), [0] * sync_degree
    for index, entry in enumerate(entries):
        if isinstance(entry.layout, Replicated):
            _plan_replicated(draft, offsets, index, entry, owner)
        else:
            _plan_sharded(draft, offsets, index, entry, sync_degree)
    slots = tuple(_finish(draft, slot, offsets[slot] if slot < sync_degree else 0) for slot in range(degree))
    return SyncPlan(degree, sync_degree, slots)


def _plan_replicated(draft: _Draft, offsets: list[int], index: int, entry: Entry, owner: int) -> None:
    move = Move(index, 0, 1, offsets[owner], entry.row_numel)
    offsets[owner] += entry.row_numel
    for slot in range(draft.degree):
        if slot == owner or entry.layout.partial_grad:
            draft.before[slot][owner].append(move)
        draft.after[owner][slot].append(move)


def _plan_sharded(draft: _Draft, offsets: list[int], index: int, entry: Entry, sync_degree: int) -> None:
    layout, degree = entry.layout, draft.degree
    local_rows = [
        {(piece.segment, piece.unit): piece.local_row for piece in layout.pieces(degree, slot)}
        for slot in range(degree)
    ]
    for number, segment in enumerate(layout.segments):
        computed, summed = segment.family.at(degree), segment.family.at(sync_degree)
        for owner in range(sync_degree):
            for unit in _owned(summed, owner):
                numel = segment.sizes[unit] * entry.row_numel
                for holder in computed.holders[unit]:
                    row = local_rows[holder][number, unit]
                    move = Move(index, row, segment.sizes[unit], offsets[owner], numel)
                    draft.before[holder][owner].append(move)
                    draft.after[owner][holder].append(move)
                offsets[owner] += numel


def _owned(layout: Layout, slot: int) -> list[int]:
    """Units whose sum ``slot`` makes, in its local order (an owner always holds the unit at the sync degree)."""
    return [unit for unit in layout.slots[slot] if layout.owners[unit] == slot]


def _finish(draft: _Draft, slot: int, numel: int) -> SlotSync:
    others = range(draft.degree)
    return SlotSync(
        keep=_merge(draft.before[slot][slot]),
        restore=_merge(draft.after[slot][slot]),
        give=tuple(_merge(draft.before[slot][to]) if to != slot else () for to in others),
        take=tuple(_merge(draft.before[origin][slot]) if origin != slot else () for origin in others),
        hand=tuple(_merge(draft.after[slot][to]) if to != slot else () for to in others),
        get=tuple(_merge(draft.after[origin][slot]) if origin != slot else () for origin in others),
        numel=numel,
    )


def _merge(moves: list[Move]) -> Moves:
    merged: list[Move] = []
    for move in moves:
        if merged and merged[-1].joins(move):
            last = merged[-1]
            merged[-1] = Move(last.param, last.row, last.rows + move.rows, last.offset, last.numel + move.numel)
        else:
            merged.append(move)
    return tuple(merged)
