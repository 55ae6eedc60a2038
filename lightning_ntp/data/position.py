"""Where an epoch stands, and what is to be loaded from there on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_ntp.data.cut import CutRule, Window, cut_evenly, cut_window
from lightning_ntp.data.fetch import Request
from lightning_ntp.data.order import Order


@dataclass(frozen=True)
class Position:
    """The micro-batch that comes next in an epoch.

    Attributes:
        cursor: Samples that the completed windows took; the position of the present window's first sample.
        window: Number of the present window.
        index: Micro-batches of it that were yielded.
        yielded: Micro-batches of the epoch that were yielded.
    """

    cursor: int = 0
    window: int = 0
    index: int = 0
    yielded: int = 0

    def after(self, window: Window) -> Position:
        """The position when one more micro-batch of ``window`` was yielded."""
        if self.index + 1 < window.count:
            return replace(self, index=self.index + 1, yielded=self.yielded + 1)
        return Position(window.stop, self.window + 1, 0, self.yielded + 1)

    def begin(self) -> Position:
        """The position at the start of the present window."""
        return replace(self, index=0, yielded=self.yielded - self.index)

    def room(self, limit: int | None) -> int | None:
        """Micro-batches from the present window's start to the epoch's end, where ``limit`` ends it; None: no limit."""
        return None if limit is None else limit - self.begin().yielded

    def cut(self, rule: CutRule, order: Order, limit: int | None) -> Window | None:
        """The present window; ``limit`` is the number of micro-batches after which the epoch ends."""
        return cut_window(rule, order.extent, self.cursor, self.window, self.room(limit))


def cut_passes(samples: int, cap: int | None) -> tuple[int, ...]:
    """Sizes of the passes of a micro-batch; a dummy is one pass of no samples."""
    if cap is None or samples <= cap:
        return (samples,)
    return cut_evenly(samples, -(-samples // cap))


def plan_requests(
    order: Order,
    rule: CutRule,
    position: Position,
    window: Window | None,
    *,
    replica: int,
    key: tuple[int, int],
    cap: int | None = None,
    limit: int | None = None,
) -> Iterator[Request]:
    """One request a pass, from ``position`` to the epoch's end.

    The present window is ``window`` if that is given; all others are cut by ``rule``. Workers pull this ahead
    of what is yielded, so it depends on nothing that changes meanwhile.
    """
    while window := window or position.cut(rule, order, limit):
        span = window.span(replica, position.index)
        first = span.start
        for size in cut_passes(len(span), cap):
            # Without samples: the window's first one, so that the pass has the usual shapes.
            where = range(first, first + size) if size else range(window.start, window.start + 1)
            yield Request(order.at(where), where.start, key)
            first += size
        position = position.after(window)
        window = window if position.index else None
