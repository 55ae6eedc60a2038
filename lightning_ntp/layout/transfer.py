"""Transfers between two views: exactly the units that a member lacks, each from one source.

A member keeps what it holds; what its new slot wants besides comes from a member of its own replica if one holds it
(the scale-up domain), else from a peer replica, spread so that no source sends much more than another.

Pure: no torch, no processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ntp.layout.shard import Piece, Sharded


@dataclass(frozen=True)
class Holder:
    """A member at a slot of a replica of some degree: it holds what that slot's layout says.

    Attributes:
        member: Any id that is the same before and after.
    """

    member: int
    replica: int
    degree: int
    slot: int


@dataclass(frozen=True)
class Slice:
    """``rows`` rows of a parameter that travel, in local rows of the source's old and the target's new tensor."""

    source: int
    target: int
    source_row: int
    target_row: int
    rows: int


@dataclass(frozen=True)
class Transfer:
    """How one parameter gets from the old layout to the new.

    Attributes:
        slices: What travels; source and target differ.
        kept: Per target member, (old row, new row, rows) that it has already.
        lost: Dense row ranges (start, rows) that no live member holds.
    """

    slices: tuple[Slice, ...]
    kept: dict[int, tuple[tuple[int, int, int], ...]]
    lost: tuple[tuple[int, int], ...]

    @property
    def moved_rows(self) -> int:
        return sum(piece.rows for piece in self.slices)


def plan_transfer(layout: Sharded, before: Sequence[Holder], after: Sequence[Holder]) -> Transfer:
    """Plan the moves of one sharded parameter from the slots ``before`` to those ``after``.

    Args:
        layout: The parameter's layout.
        before: Live members that still hold their old part; whoever is gone is left out.
        after: Members of the new view; one that is not in ``before`` starts with nothing.
    """
    held = {holder.member: _by_unit(layout, holder) for holder in before}
    replica_of = {holder.member: holder.replica for holder in before}
    sent = dict.fromkeys(held, 0)
    slices, kept, lost = [], {}, set()
    for target in after:
        own, kept_runs = held.get(target.member, {}), []
        for piece in layout.pieces(target.degree, target.slot):
            key = (piece.segment, piece.unit)
            if key in own:
                kept_runs.append((own[key].local_row, piece.local_row, piece.rows))
                continue
            sources = [member for member, units in held.items() if key in units]
            if not sources:
                lost.add((piece.dense_row, piece.rows))
                continue
            source = min(sources, key=lambda m: (replica_of[m] != target.replica, sent[m], m))
            sent[source] += piece.rows
            slices.append(Slice(source, target.member, held[source][key].local_row, piece.local_row, piece.rows))
        kept[target.member] = _merge_runs(kept_runs)
    return Transfer(_merge_slices(slices), kept, tuple(sorted(lost)))


def _by_unit(layout: Sharded, holder: Holder) -> dict[tuple[int, int], Piece]:
    return {(piece.segment, piece.unit): piece for piece in layout.pieces(holder.degree, holder.slot)}


def _merge_runs(runs: list[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    merged: list[tuple[int, int, int]] = []
    for old_row, new_row, rows in runs:
        if merged and merged[-1][0] + merged[-1][2] == old_row and merged[-1][1] + merged[-1][2] == new_row:
            merged[-1] = (merged[-1][0], merged[-1][1], merged[-1][2] + rows)
        else:
            merged.append((old_row, new_row, rows))
    return tuple(merged)


def _merge_slices(slices: list[Slice]) -> tuple[Slice, ...]:
    merged: list[Slice] = []
    for piece in slices:
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.source, last.target) == (piece.source, piece.target)
            and last.source_row + last.rows == piece.source_row
            and last.target_row + last.rows == piece.target_row
        ):
            merged[-1] = Slice(last.source, last.target, last.source_row, last.target_row, last.rows + piece.rows)
        else:
            merged.append(piece)
    return tuple(merged)
