"""How one parameter lies on the slots of a replica: replicated, or sharded along one dimension in segments.

A fused projection is several tensors glued together ([q | k | v], [gate | up]); each is a segment with its own units.
Slots keep the segments glued: a local tensor is the local part of segment 0, then of segment 1, and so on. Inside a
segment the prefix property holds, so a unit that arrives is inserted at its segment's end.

Pure: no torch, no processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from lightning_ntp.errors import LayoutError
from lightning_ntp.layout.family import Family


@dataclass(frozen=True)
class Segment:
    """Consecutive rows of a sharded dimension that are dealt out by one family.

    Attributes:
        family: Says which units a slot holds.
        sizes: Rows of each unit.
    """

    family: Family
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.sizes) != self.family.num_units:
            raise LayoutError(f"{len(self.sizes)} unit sizes for a family of {self.family.num_units} units")

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First row of each unit, counted from the segment's first row."""
        return (0, *accumulate(self.sizes))[:-1]

    @property
    def extent(self) -> int:
        return sum(self.sizes)

    def local_extent(self, degree: int, slot: int) -> int:
        return sum(self.sizes[unit] for unit in self.family.at(degree).slots[slot])


@dataclass(frozen=True)
class Piece:
    """One unit in a local tensor: ``rows`` rows at ``dense_row`` of the dense, ``local_row`` of the slot's tensor."""

    segment: int
    unit: int
    dense_row: int
    local_row: int
    rows: int


@dataclass(frozen=True)
class Sharded:
    """A parameter cut along ``dim`` into segments.

    Attributes:
        dim: The sharded dimension (0: rows of a weight or a bias, 1: columns).
        segments: In the order in which they lie along ``dim``.
    """

    dim: int
    segments: tuple[Segment, ...]

    @property
    def extent(self) -> int:
        """Rows of the dense tensor along ``dim``."""
        return sum(segment.extent for segment in self.segments)

    def local_extent(self, degree: int, slot: int) -> int:
        """Rows of a slot's local tensor along ``dim``."""
        return sum(segment.local_extent(degree, slot) for segment in self.segments)

    def pieces(self, degree: int, slot: int) -> tuple[Piece, ...]:
        """The units of a slot's local tensor, in local order."""
        return _pieces(self, degree, slot)

    def is_shared(self, degree: int) -> bool:
        """Whether some unit has several holders at ``degree``, so that gradients there are partial."""
        return any(segment.family.at(degree).is_shared for segment in self.segments)


@dataclass(frozen=True)
class Replicated:
    """A parameter that every slot holds whole.

    Attributes:
        partial_grad: Each slot's gradient is a part of the sum (a norm applied to local heads only), so the slots'
            gradients are added. Otherwise the slots compute equal gradients and one of them counts.
    """

    partial_grad: bool = False


ParameterLayout = Sharded | Replicated


@lru_cache(maxsize=65536)
def _pieces(layout: Sharded, degree: int, slot: int) -> tuple[Piece, ...]:
    pieces, dense_base, local_row = [], 0, 0
    for index, segment in enumerate(layout.segments):
        for unit in segment.family.at(degree).slots[slot]:
            rows = segment.sizes[unit]
            pieces.append(Piece(index, unit, dense_base + segment.starts[unit], local_row, rows))
            local_row += rows
        dense_base += segment.extent
    return tuple(pieces)


def merge_rows(pieces: tuple[Piece, ...]) -> tuple[tuple[int, int, int], ...]:
    """Join pieces that are neighbours in both tensors.

    Returns:
        (dense_row, local_row, rows) runs, in local order.
    """
    runs: list[tuple[int, int, int]] = []
    for piece in pieces:
        if runs and runs[-1][0] + runs[-1][2] == piece.dense_row and runs[-1][1] + runs[-1][2] == piece.local_row:
            dense_row, local_row, rows = runs[-1]
            runs[-1] = (dense_row, local_row, rows + piece.rows)
        else:
            runs.append((piece.dense_row, piece.local_row, piece.rows))
    return tuple(runs)
