"""Key-value heads of grouped-query attention: they follow the query heads.

The query head is the unit of attention. A slot holds the KV heads that its query heads read, in the order in which its
query list first needs them (sorted order would break the prefix property). A KV head read from several slots is held by
each of them, and its gradient is partial on each: the sum is made at its owner, the holder of most of its query heads.

    >>> GroupedFamily(num_heads=8, num_kv_heads=2, nominal_degree=4).at(3).slots   # queries (0,1,6) (2,3,7) (4,5)
    ((0, 1), (0, 1), (1,))

Pure: no torch, no processes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from lightning_ntp.errors import LayoutError
from lightning_ntp.layout.family import Layout, LayoutFamily


@dataclass(frozen=True)
class GroupedFamily:
    """The KV heads that go with ``LayoutFamily(num_heads, nominal_degree)``.

    Raises:
        LayoutError: if ``num_heads`` is not a multiple of ``num_kv_heads``.
    """

    num_heads: int
    num_kv_heads: int
    nominal_degree: int

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise LayoutError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}: "
                "every KV head must serve the same number of query heads"
            )

    @property
    def num_units(self) -> int:
        return self.num_kv_heads

    @property
    def queries(self) -> LayoutFamily:
        return LayoutFamily(self.num_heads, self.nominal_degree)

    def at(self, degree: int) -> Layout:
        """KV heads by slot, in order of first use, with the owner of each."""
        return _follow(self.num_heads, self.num_kv_heads, self.nominal_degree, degree)

    def reads(self, degree: int, slot: int) -> tuple[int, ...]:
        """For each local query head, the local index of the KV head that it reads."""
        group = self.num_heads // self.num_kv_heads
        position = {unit: index for index, unit in enumerate(self.at(degree).slots[slot])}
        return tuple(position[head // group] for head in self.queries.at(degree).slots[slot])

    def local_group(self, degree: int, slot: int) -> int | None:
        """Query heads per KV head if the slot's heads form equal, contiguous groups, as grouped attention code expects.

        Returns:
            The group size, or ``None`` where the groups are ragged: then plain ``repeat_kv`` would pair wrong heads.
        """
        reads = self.reads(degree, slot)
        kv_heads = len(self.at(degree).slots[slot])
        if not reads:
            return self.num_heads // self.num_kv_heads
        size, rest = divmod(len(reads), kv_heads)
        return size if not rest and reads == tuple(i // size for i in range(len(reads))) else None


@lru_cache(maxsize=4096)
def _follow(num_heads: int, num_kv_heads: int, nominal_degree: int, degree: int) -> Layout:
    group = num_heads // num_kv_heads
    queries = LayoutFamily(num_heads, nominal_degree).at(degree)
    used = [Counter(head // group for head in heads) for heads in queries.slots]  # a Counter keeps first-use order
    owners = tuple(max(range(degree), key=lambda slot, unit=unit: used[slot][unit]) for unit in range(num_kv_heads))
    return Layout(tuple(tuple(counts) for counts in used), owners)
