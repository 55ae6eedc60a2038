"""How an epoch is cut into windows, shares and micro-batches. Pure arithmetic on positions in the epoch's order.

A window is the micro-batches of one optimizer step. It covers consecutive positions; the replicas take consecutive
pieces of it, in replica order, and each cuts its piece into the same number of micro-batches:

    >>> rule = CutRule(shares=(5, 3), micro_batches=3)
    >>> cut_window(rule, Extent(total=100), start=0, index=0).sizes
    ((2, 2, 1), (1, 1, 1))

Everybody can compute everybody's cut, so nothing has to be agreed but the shares.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from lightning_ntp.policy import deal


@dataclass(frozen=True)
class Extent:
    """The length of an epoch's order.

    Attributes:
        total: Number of samples.
        ends: Where the lists of a user's batch sampler end (cumulative, ascending); None without a batch sampler.
    """

    total: int
    ends: tuple[int, ...] | None = None


@dataclass(frozen=True)
class CutRule:
    """What decides the cut, apart from the position.

    Attributes:
        shares: Samples of a full global batch that each replica takes; only their proportion counts for a batch
            sampler.
        micro_batches: Micro-batches of a full window (Lightning's ``accumulate_grad_batches``).
        drop_last: Whether the epoch's partial window is dropped. With equal shares its whole per-replica batches stay,
            as users of data parallelism expect.
    """

    shares: tuple[int, ...]
    micro_batches: int
    drop_last: bool = False


@dataclass(frozen=True)
class Window:
    """One global batch, cut.

    Attributes:
        index: Number of the window in its epoch.
        start: Position of its first sample in the epoch's order.
        sizes: For each replica the sizes of its micro-batches, in samples; 0 where it has none.
        count: Micro-batches that are run: fewer than were cut only where the trainer's limit ends the epoch early.
    """

    index: int
    start: int
    sizes: tuple[tuple[int, ...], ...]
    count: int

    @property
    def samples(self) -> int:
        """Samples of the window that are run, over all replicas."""
        return sum(sum(sizes[: self.count]) for sizes in self.sizes)

    @property
    def stop(self) -> int:
        """Position behind the window's last sample."""
        return self.start + sum(sum(sizes) for sizes in self.sizes)

    def span(self, replica: int, micro_batch: int) -> range:
        """Positions of the samples of one micro-batch of ``replica``."""
        before = sum(sum(sizes) for sizes in self.sizes[:replica])
        first = self.start + before + sum(self.sizes[replica][:micro_batch])
        return range(first, first + self.sizes[replica][micro_batch])


def cut_evenly(n: int, parts: int) -> tuple[int, ...]:
    """Cut ``n`` samples into ``parts`` sizes that differ by one at most, the larger ones first."""
    base, rest = divmod(n, parts)
    return tuple(base + (part < rest) for part in range(parts))


def cut_window(rule: CutRule, extent: Extent, start: int, index: int, room: int | None = None) -> Window | None:
    """Cut the window that begins at position ``start``.

    Args:
        rule: Shares and number of micro-batches.
        extent: Length of the epoch.
        start: Position of the window's first sample; the end of a list if the epoch has lists.
        index: Number of the window in its epoch.
        room: Micro-batches that the trainer still runs in this epoch; None for all.

    Returns:
        The window, or None if the epoch has no further one.
    """
    if start >= extent.total or (room is not None and room < 1):
        return None
    parts, count = _deal_lists(rule, extent, start) if extent.ends else _deal_samples(rule, extent.total - start)
    if count == 0:
        return None
    sizes = tuple(cut_evenly(part, count) for part in parts)
    return Window(index, start, sizes, count if room is None else min(count, room))


def count_micro_batches(rule: CutRule, extent: Extent, start: int) -> int:
    """Micro-batches from position ``start`` to the epoch's end, the same on all replicas."""
    if start >= extent.total:
        return 0
    if extent.ends:
        per_window = len(rule.shares) * rule.micro_batches
        full, rest = divmod(len(extent.ends) - bisect_right(extent.ends, start), per_window)
        return full * rule.micro_batches + _count_for_lists(rule, rest)
    full, rest = divmod(extent.total - start, sum(rule.shares))
    return full * rule.micro_batches + (_deal_samples(rule, rest)[1] if rest else 0)


def _deal_samples(rule: CutRule, left: int) -> tuple[tuple[int, ...], int]:
    """Samples of each replica and number of micro-batches, when ``left`` samples are left in the epoch."""
    if left >= sum(rule.shares):
        return rule.shares, rule.micro_batches
    if rule.drop_last:
        return _whole_batches(rule, left)
    parts = deal(left, rule.shares)
    # As many micro-batches as the replicas need at the size they have in a full window, so that none gets bigger.
    sizes = [max(1, -(-share // rule.micro_batches)) for share in rule.shares]
    needed = max(-(-part // size) for part, size in zip(parts, sizes, strict=True))
    return parts, max(1, min(rule.micro_batches, needed))


def _whole_batches(rule: CutRule, left: int) -> tuple[tuple[int, ...], int]:
    replicas, share = len(rule.shares), rule.shares[0]
    if len(set(rule.shares)) > 1 or share % rule.micro_batches:
        return (0,) * replicas, 0
    size = share // rule.micro_batches
    count = left // (size * replicas)
    return (count * size,) * replicas, count


def _deal_lists(rule: CutRule, extent: Extent, start: int) -> tuple[tuple[int, ...], int]:
    """As ``_deal_samples``, where a global batch is a number of consecutive lists of the user's batch sampler."""
    ends = extent.ends or ()
    first = bisect_right(ends, start)
    last = min(first + len(rule.shares) * rule.micro_batches, len(ends))
    return deal(ends[last - 1] - start, rule.shares), _count_for_lists(rule, last - first)


def _count_for_lists(rule: CutRule, lists: int) -> int:
    return min(rule.micro_batches, -(-lists // len(rule.shares)))
