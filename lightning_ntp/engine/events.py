"""What a failure or a change of view looks like to whoever wants to know: typed events, in the order they happen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_ntp.engine.verify import Verdict
from lightning_ntp.hardware.findings import Finding
from lightning_ntp.membership.view import View
from lightning_ntp.topology import Seat


@dataclass(frozen=True)
class FailureEvent:
    """This member has left a generation because of a failure.

    Attributes:
        generation: The generation that has ended.
        step: The optimizer step that was under way.
        cause: What this member heard or saw.
    """

    generation: int
    step: int
    cause: str


@dataclass(frozen=True)
class ViewEvent:
    """A change of view, agreed on (``on_ntp_view``) or complete (``on_ntp_recovered``, ``on_ntp_rejoin``).

    Attributes:
        generation: Of the new view.
        step: The step that the view commits.
        cause: Why the view before has ended.
        gone: Seats that have left since the view before.
        joined: Seats that have joined.
        leader: Seat of the leader.
        degrees_before: Degree by the number of the replica.
        degrees_after: The same in the new view; a replica without members has no entry.
        seconds: Time by phase: ``"agree"`` (from leaving the collectives to the change), ``"open"`` (channels),
            ``"move"`` (shards), ``"total"``. Empty before the change is complete.
        sent_bytes: Bytes of shards that this member has sent.
        received_bytes: Bytes of shards that it has received.
    """

    generation: int
    step: int
    cause: str
    gone: tuple[Seat, ...]
    joined: tuple[Seat, ...]
    leader: Seat
    degrees_before: Mapping[int, int]
    degrees_after: Mapping[int, int]
    seconds: Mapping[str, float] = field(default_factory=dict)
    sent_bytes: int = 0
    received_bytes: int = 0

    @classmethod
    def between(cls, before: View, after: View, cause: str) -> ViewEvent:
        """The change from one view to a later one."""
        return cls(
            generation=after.generation,
            step=after.step,
            cause=cause,
            gone=tuple(seat for seat in before.members if _process(before, seat) != _process(after, seat)),
            joined=tuple(seat for seat in after.members if _process(before, seat) != _process(after, seat)),
            leader=after.leader,
            degrees_before=degrees_by_number(before),
            degrees_after=degrees_by_number(after),
        )


@dataclass(frozen=True)
class CorruptionEvent(Verdict):
    """Members hold different bits of what should be equal.

    Attributes:
        generation: Of the view in which it was seen.
    """

    generation: int = 0


class Observer:
    """Hears of failures and changes, in the main thread of its member. Override what is of interest."""

    def on_failure(self, event: FailureEvent) -> None:
        """This member has left a generation; nothing else has changed yet."""

    def on_view(self, event: ViewEvent) -> None:
        """The next view is agreed on; the step that it commits is finished with the old one's degrees."""

    def on_change(self, event: ViewEvent) -> None:
        """The next view is entered: channels, shards and slots are its own."""

    def on_corruption(self, event: CorruptionEvent) -> None:
        """The vote has found weights that differ."""

    def on_finding(self, finding: Finding) -> None:
        """Somebody who watches this member's device has found something."""

    def on_leave(self) -> None:
        """This member has handed over its part, and ends."""


def degrees_by_number(view: View) -> dict[int, int]:
    """Degree of each live replica, by its number."""
    return {replica[0].replica: len(replica) for replica in view.seats}


def _process(view: View, seat: Seat) -> int | None:
    """Which process sits at a seat."""
    return view.incarnations.get(seat)
