"""What members and launchers tell all others, through the event log; and what follows from all events so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from lightning_ntp.errors import MembershipError
from lightning_ntp.membership.parse import Fields, parse_seat
from lightning_ntp.topology import Seat

MAX_TEXT = 20_000
"""Characters of an event's text, such as a traceback; what is longer loses its middle."""


def last_words(text: str, most: int = 200) -> str:
    """The end of a cause, from a whole word on: there gloo's errors say what they are about.

        >>> last_words("one two three", 9)
        '... three'
    """
    return text if len(text) <= most else "... " + text[-most:].partition(" ")[2]


class Kind(StrEnum):
    """Kinds of events."""

    DEAD = "dead"  # the process at a seat has ended, or was silent for longer than its lease
    OVER = "over"  # a generation has ended: leave all its collectives
    DONE = "done"  # a member has finished its work (with a text: handed over its part); it is missed by nobody
    FATAL = "fatal"  # the job must end, with this text
    KILL = "kill"  # a request to the seat's launcher
    EXPELLED = "expelled"  # the others go on without this member, though it may live
    WAITING = "waiting"  # a joiner waits for admission
    LEFT = "left"  # a process says nothing more; it only ends its own watcher's wait
    DRAIN = "drain"  # a request to a member: hand over your part and leave
    RETURN = "return"  # a request to the seat's launcher: start a process there again


@dataclass(frozen=True)
class Event:
    """One entry of the log.

    Attributes:
        kind: What has happened.
        seat: Whom it is about (for ``OVER`` and ``FATAL``: who says so).
        incarnation: Which process at that seat.
        generation: Of the view in which it happened.
        text: Cause, for the reader.
    """

    kind: Kind
    seat: Seat
    incarnation: int = 0
    generation: int = -1
    text: str = ""

    @property
    def last_line(self) -> str:
        """Of the text: there a traceback says what it was about."""
        return self.text.strip().rpartition("\n")[2][:500]

    def to_json(self) -> dict[str, Any]:
        text = self.text
        if len(text) > MAX_TEXT:  # the start says where, the end says what
            text = text[: MAX_TEXT // 2] + "\n[...]\n" + text[-MAX_TEXT // 2 + 10 :]
        return {
            "kind": self.kind.value,
            "seat": str(self.seat),
            "incarnation": self.incarnation,
            "generation": self.generation,
            "text": text,
        }

    @classmethod
    def from_json(cls, data: Any) -> Event:
        """Read :meth:`to_json`.

        Raises:
            MembershipError: if it is anything else.
        """
        fields = Fields("event", data)
        kind, seat, text = fields.take("kind", str), fields.take("seat", str), fields.take("text", str)
        if kind not in set(Kind) or len(text) > MAX_TEXT:
            raise MembershipError(f"event: kind={kind[:40]!r} is unknown, or its text is too long ({len(text)})")
        event = cls(
            Kind(kind),
            parse_seat(seat),
            fields.number("incarnation", at_least=0),
            fields.number("generation", at_least=-1),
            text,
        )
        fields.finish()
        return event


@dataclass
class Facts:
    """All that follows from the events that one reader has seen. Only grows.

    Attributes:
        read: Position in the log: events before it are in here.
        gone: (seat, incarnation) of members that are dead or expelled.
        expelled: Those that were expelled.
        done: Those that have finished.
        departed: Those of them that left before the job's end: they had handed over their parts.
        left: Those that give no more signs of life, for they are ending.
        over: The newest generation that has ended, and why.
        waiting: Joiners that wait, with their incarnation.
        kills: Requests to launchers.
        drains: Requests to members to leave.
        returns: Seats at which a process shall be started again, in the order of the requests.
        fatal: The event that ends the job, if one does.
        causes: Why a member is gone, for the reader.
    """

    read: int = 0
    gone: set[tuple[Seat, int]] = field(default_factory=set)
    expelled: set[tuple[Seat, int]] = field(default_factory=set)
    done: set[tuple[Seat, int]] = field(default_factory=set)
    departed: set[tuple[Seat, int]] = field(default_factory=set)
    left: set[tuple[Seat, int]] = field(default_factory=set)
    over: int = -2
    over_text: str = ""
    waiting: dict[Seat, int] = field(default_factory=dict)
    kills: set[tuple[Seat, int]] = field(default_factory=set)
    drains: set[tuple[Seat, int]] = field(default_factory=set)
    returns: list[Seat] = field(default_factory=list)
    fatal: Event | None = None
    causes: dict[tuple[Seat, int], str] = field(default_factory=dict)

    @property
    def has_finished(self) -> bool:
        """Whether somebody has done all of the job's work."""
        return bool(self.done - self.departed)

    def add(self, event: Event | None) -> None:
        """Take in the event at position ``read``; ``None`` for a slot that holds nothing valid."""
        self.read += 1
        if event is None:
            return
        who = (event.seat, event.incarnation)
        match event.kind:
            case Kind.DEAD | Kind.EXPELLED:
                self.gone.add(who)
                self.causes.setdefault(who, event.text)
                if event.kind is Kind.EXPELLED:
                    self.expelled.add(who)
            case Kind.OVER:
                if event.generation > self.over:
                    self.over, self.over_text = event.generation, f"{event.seat} reports: {event.text}"
            case Kind.DONE:
                self.done.add(who)
                if event.text:
                    self.departed.add(who)
            case Kind.LEFT:
                self.left.add(who)
            case Kind.FATAL:
                self.fatal = self.fatal or event
            case Kind.KILL:
                self.kills.add(who)
            case Kind.DRAIN:
                self.drains.add(who)
            case Kind.RETURN:
                self.returns.append(event.seat)
            case Kind.WAITING:
                self.waiting[event.seat] = event.incarnation
