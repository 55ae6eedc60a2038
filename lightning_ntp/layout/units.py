"""How an extent (FFN columns, vocabulary rows) is cut into units.

Pure: no torch, no processes.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_ntp.errors import LayoutError
from lightning_ntp.layout.family import LayoutFamily

LARGEST_BLOCK = 128
TOLERATED_IMBALANCE = 1.01


def even_units(extent: int, num_units: int) -> tuple[int, ...]:
    """Cut ``extent`` rows into ``num_units`` units of one size, such as heads.

    Raises:
        LayoutError: if they do not divide.
    """
    if num_units < 1 or extent % num_units:
        raise LayoutError(f"{extent} rows do not divide into num_units={num_units} units of one size")
    return (extent // num_units,) * num_units


def block_units(extent: int, block: int) -> tuple[int, ...]:
    """Cut ``extent`` rows into blocks; the last may be short."""
    whole, rest = divmod(extent, block)
    return (block,) * whole + ((rest,) if rest else ())


def auto_block(extent: int, nominal_degree: int, degrees: Iterable[int]) -> int:
    """The largest power of two up to 128 rows whose imbalance stays under 1 % at every reachable degree, else 1.

    Large blocks keep matrix sizes friendly to the hardware and transfers few; small ones keep the slots even.
    """
    reachable = tuple(degrees)
    block = LARGEST_BLOCK
    while block > 1 and not _is_even(block_units(extent, block), nominal_degree, reachable):
        block //= 2
    return block


def _is_even(sizes: tuple[int, ...], nominal_degree: int, degrees: tuple[int, ...]) -> bool:
    family = LayoutFamily(len(sizes), nominal_degree)
    for degree in degrees:
        fullest = max(sum(sizes[unit] for unit in units) for units in family.at(degree).slots)
        if fullest * degree >= TOLERATED_IMBALANCE * sum(sizes):
            return False
    return True
