"""What whoever watches a device has to say about it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

log = logging.getLogger(__name__)


class Verdict(Enum):
    """What a finding means for the member. From the worst to the mildest."""

    LOST = "lost"  # the device is of no use: the member ends now, and the others go on without it
    LEAVE = "leave"  # it still works: the member hands over its part at the next boundary, and ends
    DEGRADED = "degraded"  # it works, but slower than it should: shares and boosts have to take care of it
    NOTE = "note"  # for the log; nothing is to be done


@dataclass(frozen=True)
class Finding:
    """One thing that was found. Two are equal if they say the same, whenever they were found.

    Attributes:
        verdict: What it means.
        source: What was looked at: ``"xid"``, ``"event"``, ``"recovery action"``, ``"ecc"``, ``"remap"``,
            ``"nvlink"``, ``"throttle"``, ``"driver"``, ``"heartbeat"``, ``"straggler"``, or a user's detector.
        text: What was seen, in words.
        subject: The device's UUID, or the seat.
        xid: The XID's number, if it was one.
        is_recovery: Whether it says that an earlier finding of this source no longer holds.
        at_s: When, on the machine's monotonic clock.
    """

    verdict: Verdict
    source: str
    text: str
    subject: str = ""
    xid: int | None = None
    is_recovery: bool = False
    at_s: float | None = field(default=None, compare=False)

    def __str__(self) -> str:
        about = f"{self.subject}: " if self.subject else ""
        return f"{about}{self.verdict.value}: {self.text}"


def worst(findings: Iterable[Finding]) -> Verdict | None:
    """The worst verdict; ``None`` without findings."""
    order = list(Verdict)
    return min((finding.verdict for finding in findings), key=order.index, default=None)


class Once:
    """Hands each finding on once, and says when what stood before no longer holds.

    Args:
        hand_on: Gets the findings, in the thread that found them. What it raises is logged: whoever watches goes on.
    """

    def __init__(self, hand_on: Callable[[Finding], object]) -> None:
        self._hand_on = hand_on
        self._told: set[Finding] = set()
        self._standing: frozenset[Finding] = frozenset()

    def tell(self, finding: Finding) -> None:
        """Something that has happened."""
        if finding not in self._told:
            self._told.add(finding)
            self._send(finding)

    def settle(self, current: Iterable[Finding], at_s: float) -> None:
        """All that holds right now. What holds again after it was over is told again."""
        current = tuple(current)
        for finding in current:
            if finding not in self._standing:
                self._send(replace(finding, at_s=at_s))
        sources = {finding.source for finding in current}
        for finding in sorted(self._standing - set(current), key=str):
            if finding.source not in sources:
                text = f"over: {finding.text}"
                self._send(replace(finding, verdict=Verdict.NOTE, text=text, is_recovery=True, at_s=at_s))
                sources.add(finding.source)
        self._standing = frozenset(current)

    def _send(self, finding: Finding) -> None:
        try:
            self._hand_on(finding)
        except Exception:
            log.exception("what should be done about %s has failed", finding)
