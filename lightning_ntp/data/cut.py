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
from dataclasses import dataclass, replace
from functools import cached_property

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
        shares: Samples of a full global batch that each replica takes, 0 for one without members; only their
            proportion counts for a batch sampler.
        micro_batches: Micro-batches of a full window (Lightning's ``accumulate_grad_batches``).
        drop_last: Whether the epoch's partial window is dropped. Where all shares above 0 are equal, its whole
            per-replica batches stay, as users of data parallelism expect.
    """

    shares: tuple[int, ...]
    micro_batches: int
    drop_last: bool = False


@dataclass(frozen=True)
class Window:
    """One global batch, cut. Its samples are consecutive in the epoch's order, in replica order.

    Attributes:
        index: Number of the window in its epoch.
        start: Position of its first sample in the epoch's order.
        shares: What it was cut by.
        parts: Samples of it that each replica takes.
        count: Micro-batches of it, the same on all replicas.
        whole: Micro-batches that it would have without the trainer's limit, which may end an epoch inside a window.
        tail: Samples behind it that ``drop_last`` drops. They stay dropped at any shares: a window behind a partial one
            would not begin at a multiple of ``micro_batches``, where Lightning's loop begins one.
    """

    index: int
    start: int
    shares: tuple[int, ...]
    parts: tuple[int, ...]
    count: int
    whole: int
    tail: int = 0

    @cached_property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """For each replica the sizes of its micro-batches, in samples; 0 where it has none."""
        return tuple(cut_evenly(part, self.count) for part in self.parts)

    @property
    def samples(self) -> int:
        """Samples of the window over all replicas."""
        return sum(self.parts)

    @property
    def stop(self) -> int:
        """Where the next window begins."""
        return self.start + self.samples + self.tail

    def span(self, replica: int, micro_batch: int) -> range:
        """Positions of the samples of one micro-batch of ``replica``."""
        first = self.start + sum(self.parts[:replica]) + sum(self.sizes[replica][:micro_batch])
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
    parts, whole = _deal_lists(rule, extent, start) if extent.ends else _deal_samples(rule, extent.total - start)
    if whole == 0:
        return None
    count = whole if room is None else min(whole, room)
    if count < whole:
        parts = _first_of(parts, whole, count)
    is_partial = whole < rule.micro_batches
    tail = extent.total - start - sum(parts) if rule.drop_last and is_partial else 0
    return Window(index, start, rule.shares, parts, count, whole, tail)


def cut_again(rule: CutRule, extent: Extent, window: Window, is_last: bool) -> Window:
    """Cut a window anew, by other shares: the same number of micro-batches, from the same position on.

    It takes the samples that it had. If the shares add up to fewer than those it was cut by, it takes fewer: what they
    carry in that many micro-batches.

    Args:
        rule: The new shares.
        extent: Length of the epoch.
        window: The window as it was cut last.
        is_last: Whether the epoch ends with it. Then it keeps its samples at any shares: there is no later for what it
            would leave, and Lightning, which knows it to be the last, would not come to a further one.
    """
    if rule.shares == window.shares:
        return window
    parts = deal(window.samples, rule.shares)
    if not is_last and not extent.ends and sum(rule.shares) < sum(window.shares):
        carried = _first_of(rule.shares, rule.micro_batches, window.count)
        parts = carried if sum(carried) < window.samples else parts
    return replace(window, shares=rule.shares, parts=parts)


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
    live = [share for share in rule.shares if share]
    share = live[0]
    if len(set(live)) > 1 or share % rule.micro_batches:
        return (0,) * len(rule.shares), 0
    size = share // rule.micro_batches
    count = left // (size * len(live))
    return tuple(count * size if share else 0 for share in rule.shares), count


def _first_of(parts: tuple[int, ...], whole: int, count: int) -> tuple[int, ...]:
    """What the replicas take in the first ``count`` of ``whole`` micro-batches."""
    return tuple(sum(cut_evenly(part, whole)[:count]) for part in parts)


def _deal_lists(rule: CutRule, extent: Extent, start: int) -> tuple[tuple[int, ...], int]:
    """As ``_deal_samples``, where a global batch is a number of consecutive lists of the user's batch sampler."""
    ends = extent.ends or ()
    first = bisect_right(ends, start)
    last = min(first + len(rule.shares) * rule.micro_batches, len(ends))
    return deal(ends[last - 1] - start, rule.shares), _count_for_lists(rule, last - first)


def _count_for_lists(rule: CutRule, lists: int) -> int:
    return min(rule.micro_batches, -(-lists // len(rule.shares)))
