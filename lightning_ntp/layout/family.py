"""Nested layouts: which units each slot of a tensor-parallel group holds, at every degree.

A family deals ``num_units`` units to the slots of a replica. All its layouts come from the one at the nominal degree by
taking slots away from the end, so that a layout depends on (units, nominal degree, degree) alone, whichever GPU failed:

    >>> family = LayoutFamily(num_units=8, nominal_degree=4)
    >>> family.at(4).slots
    ((0, 1), (2, 3), (4, 5), (6, 7))
    >>> family.at(3).slots          # slot 3 gave unit 6 to slot 0 and unit 7 to slot 1
    ((0, 1, 6), (2, 3, 7), (4, 5))

Two properties carry the design and are tested exhaustively:

*balance*  At every degree the fullest slot holds at most one unit more than the emptiest.
*prefix*   Slot i at degree n is a prefix of slot i at any lower degree: going down, only the slots that vanish send
           anything, and going up is the exact reverse.

Pure: no torch, no processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

from lightning_ntp.errors import LayoutError


@dataclass(frozen=True)
class Layout:
    """The units of every slot at one degree.

    Attributes:
        slots: For each slot its unit ids, in the order in which they lie in the local tensor. A slot may be empty.
        owners: For each unit the slot that sums its gradient. Without one it is the unit's only holder.
    """

    slots: tuple[tuple[int, ...], ...]
    owners: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.owners:
            owner_of = {unit: slot for slot, units in enumerate(self.slots) for unit in units}
            object.__setattr__(self, "owners", tuple(owner_of[unit] for unit in range(len(owner_of))))

    @property
    def degree(self) -> int:
        return len(self.slots)

    @cached_property
    def loads(self) -> tuple[int, ...]:
        """Number of units in each slot."""
        return tuple(len(units) for units in self.slots)

    @property
    def imbalance(self) -> float:
        """Largest load over the mean load: the factor by which the fullest slot is slower than an even cut."""
        return max(self.loads) * self.degree / sum(self.loads)

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """For each unit the slots that hold it, ascending."""
        held: list[list[int]] = [[] for _ in self.owners]
        for slot, units in enumerate(self.slots):
            for unit in units:
                held[unit].append(slot)
        return tuple(tuple(slots) for slots in held)

    @property
    def is_shared(self) -> bool:
        """Whether any unit has several holders, each with a partial gradient."""
        return sum(self.loads) > len(self.owners)

    def without_last_slot(self) -> Layout:
        """Deal the last slot's units, in their order, each to the slot with the fewest (lowest index on a tie)."""
        *kept, orphans = (list(units) for units in self.slots)
        for unit in orphans:
            min(kept, key=len).append(unit)
        return Layout(tuple(tuple(units) for units in kept))


class Family(Protocol):
    """Anything that says which units a slot holds at a degree."""

    @property
    def num_units(self) -> int: ...

    def at(self, degree: int) -> Layout: ...


@dataclass(frozen=True)
class LayoutFamily:
    """All layouts of ``num_units`` units, from ``nominal_degree`` slots down to one.

    Raises:
        LayoutError: if either number is below 1.
    """

    num_units: int
    nominal_degree: int

    def __post_init__(self) -> None:
        if self.num_units < 1 or self.nominal_degree < 1:
            raise LayoutError(
                f"cannot deal num_units={self.num_units} to nominal_degree={self.nominal_degree} slots: "
                "both must be at least 1"
            )

    def at(self, degree: int) -> Layout:
        """The layout at ``degree``.

        Raises:
            LayoutError: if ``degree`` is not in 1..nominal_degree.
        """
        if not 1 <= degree <= self.nominal_degree:
            raise LayoutError(f"degree={degree} is outside 1..{self.nominal_degree}, the degrees of this family")
        return _deal(self.num_units, self.nominal_degree, degree)


@lru_cache(maxsize=4096)
def _deal(num_units: int, nominal_degree: int, degree: int) -> Layout:
    if degree < nominal_degree:
        return _deal(num_units, nominal_degree, degree + 1).without_last_slot()
    base, rest = divmod(num_units, nominal_degree)
    starts = [slot * base + min(slot, rest) for slot in range(nominal_degree + 1)]
    return Layout(tuple(tuple(range(a, b)) for a, b in zip(starts, starts[1:], strict=False)))
