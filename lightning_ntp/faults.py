"""Planned faults: what is to go wrong, at which seat, in which step.

For tests, the demo, and users who want to see their own job go on. Nothing happens unless somebody asks for it, and
then it really happens: a kill is a SIGKILL.

    >>> plan = FaultPlan.parse("kill r1.s2@20, slow r0.s1@5:backward 0.5s, return r1.s2@40")
    >>> [str(fault) for fault in plan.at_seat(Seat(1, 2))]
    ['kill r1.s2@20']

A fault is written ``KIND SEAT@STEP[:MOMENT[#COUNT]] [ARGUMENT]``; several are separated by commas. ``r1`` in place of a
seat means every seat of replica 1. Steps count from 0. A moment is a phase of the member or a channel that it enters;
without one it is the beginning of the step. With ``#2`` the fault waits until the member is there for the second time
in that step, which may also be because the step is run again.

========  =============================================================================================
kind      what happens
========  =============================================================================================
kill      SIGKILL, by the member to itself. Its DataLoader workers live on until its launcher ends them.
hang      SIGSTOP, by the member to itself: all its threads stop, also those that give signs of life.
raise     a plain RuntimeError, as a collective raises it when a peer is gone
oom       ``torch.OutOfMemoryError``: an error of the member's own
slow      sleeps for the time given as argument, such as ``0.5s``; the other threads go on
drain     the member asks to leave at the end of the step
flip      one bit of one parameter changes
drop      the member's next write to the store is lost
return    a process is started at the seat again; done by whoever leads, in that step
========  =============================================================================================
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from lightning_ntp.errors import ConfigError
from lightning_ntp.topology import Seat

log = logging.getLogger(__name__)

FAULTS_VARIABLE = "NTP_FAULTS"
"""Environment variable that :meth:`FaultPlan.from_env` reads."""

PHASES = (
    "start", "loading", "forward", "backward", "vote", "step", "agree", "change", "between", "outside", "evaluation",
    "checkpoint",
)  # fmt: skip
CHANNELS = ("tensor_parallel", "reshard", "data_parallel", "replica_control", "leader_control", "control", "world")
BEGINNING = "forward"
"""The moment of a fault that names none."""

GRAMMAR = "KIND SEAT@STEP[:MOMENT[#COUNT]] [ARGUMENT], e.g. 'kill r1.s2@20' or 'slow r0.s1@5:backward 0.5s'"

_NUMBER = re.compile(r"[0-9]{1,15}")
_PLACE = re.compile(r"r(0|[1-9][0-9]{0,5})(?:\.s(0|[1-9][0-9]{0,5}))?")
_SECONDS = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?) ?s")
_LONGEST_S = 86_400.0


class FaultKind(Enum):
    """What happens; see the table above."""

    KILL = "kill"
    HANG = "hang"
    RAISE = "raise"
    OOM = "oom"
    SLOW = "slow"
    DRAIN = "drain"
    RETURN = "return"
    FLIP = "flip"
    DROP = "drop"


_RAISING = (FaultKind.RAISE, FaultKind.OOM)
_BY_ACTION = (FaultKind.DRAIN, FaultKind.FLIP, FaultKind.DROP)


@dataclass(frozen=True)
class Fault:
    """One planned fault. ``str`` gives its text, and the text gives an equal fault.

    Attributes:
        kind: What happens.
        seat: Where; a replica's number means each of its seats.
        step: The optimizer step under way, from 0.
        moment: One of ``PHASES`` or ``CHANNELS``; ``None`` is the beginning of the step.
        count: Happens when the member is at that moment for the ``count``-th time in that step.
        argument: How long a slow member sleeps, in seconds; ``None`` for the other kinds.

    Raises:
        ConfigError: if a value cannot be, or does not go with the kind.
    """

    kind: FaultKind
    seat: Seat | int
    step: int
    moment: str | None = None
    count: int = 1
    argument: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, FaultKind):
            raise ConfigError(f"kind={self.kind!r} is no FaultKind: take FaultKind.KILL or another")
        if not isinstance(self.seat, (Seat, int)) or _PLACE.fullmatch(self._place) is None:
            raise ConfigError(f"seat={self.seat!r} is neither a Seat nor the number of a replica")
        if not _is_number(self.step, 0):
            raise ConfigError(f"step={self.step!r} must be a whole number, 0 or more")
        if self.moment not in (None, *PHASES, *CHANNELS):
            raise ConfigError(
                f"moment={self.moment!r} is neither a phase ({', '.join(PHASES)}) nor a channel ({', '.join(CHANNELS)})"
            )
        if not _is_number(self.count, 1):
            raise ConfigError(f"count={self.count!r} must be a whole number, 1 or more")
        if self.moment is None and self.count != 1:
            raise ConfigError(f"count={self.count} needs a moment that is counted, e.g. {BEGINNING}#{self.count}")
        if self.kind is FaultKind.RETURN and self.moment is not None:
            raise ConfigError(f"moment={self.moment!r}: a return belongs to a whole step, leave the moment out")
        self._check_argument()

    def _check_argument(self) -> None:
        seconds = self.argument
        if self.kind is not FaultKind.SLOW:
            if seconds is not None:
                raise ConfigError(f"argument={seconds!r}: {self.kind.value} takes none, only slow does")
        elif isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds <= _LONGEST_S:
            raise ConfigError(
                f"argument={seconds!r}: slow needs seconds, above 0 and at most {_LONGEST_S:.0f}, e.g. 0.5s"
            )

    @property
    def when(self) -> str:
        """The moment, also where none was named."""
        return self.moment or BEGINNING

    def covers(self, seat: Seat) -> bool:
        """Whether the fault is meant for ``seat``, by itself or with its whole replica."""
        return seat == self.seat if isinstance(self.seat, Seat) else seat.replica == self.seat

    @property
    def _place(self) -> str:
        return str(self.seat) if isinstance(self.seat, Seat) else f"r{self.seat}"

    def __str__(self) -> str:
        text = f"{self.kind.value} {self._place}@{self.step}"
        if self.moment is not None:
            text += f":{self.moment}"
        if self.count != 1:
            text += f"#{self.count}"
        if self.argument is not None:
            text += f" {str(float(self.argument)).removesuffix('.0')}s"
        return text


@dataclass(frozen=True)
class FaultPlan:
    """All faults of a job, the same on every member. ``str`` gives its text, and the text gives an equal plan.

    Attributes:
        faults: In the order in which they were named. An empty plan is false.
    """

    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "faults", tuple(self.faults))
        for fault in self.faults:
            if not isinstance(fault, Fault):
                raise ConfigError(f"faults holds {fault!r}, which is no Fault: texts are read by FaultPlan.parse")

    @classmethod
    def parse(cls, text: str, name: str = "faults") -> FaultPlan:
        """Read faults separated by commas; a blank text is an empty plan.

        Args:
            text: Such as ``"kill r1.s2@20, return r1.s2@40"``.
            name: Where the text comes from, for the message.

        Raises:
            ConfigError: quotes the piece that is wrong.
        """
        if not isinstance(text, str):
            raise ConfigError(f"{name}={text!r} must be a text: {GRAMMAR}; separate several by commas")
        if not text.strip():
            return cls()
        faults = []
        for piece in text.split(","):
            try:
                faults.append(_parse_fault(piece))
            except ConfigError as error:
                quoted = repr(piece.strip()[:100])
                raise ConfigError(f"{name}: {quoted} is no fault: {error}. Write {GRAMMAR}") from None
        return cls(tuple(faults))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> FaultPlan:
        """The plan in ``NTP_FAULTS``; an empty one if it is not set.

        Raises:
            ConfigError: as :meth:`parse`.
        """
        return cls.parse(environ.get(FAULTS_VARIABLE, ""), FAULTS_VARIABLE)

    def at_seat(self, seat: Seat, incarnation: int = 0, from_step: int | None = None) -> tuple[Fault, ...]:
        """What the member at ``seat`` does to itself. A fault of a whole replica comes out as one of this seat.

        Args:
            seat: Of the member.
            incarnation: Which process at that seat it is, from 0. A later one leaves out what an earlier one did: else
                it would kill itself again and again.
            from_step: The step at which a later process joined: only faults of steps after it remain, none if it is not
                known.
        """
        faults = tuple(
            replace(fault, seat=seat)
            for fault in self.faults
            if fault.kind is not FaultKind.RETURN and fault.covers(seat)
        )
        if incarnation == 0:
            return faults
        return tuple(fault for fault in faults if from_step is not None and fault.step > from_step)

    def returns(self) -> tuple[Fault, ...]:
        """What whoever leads has to do: the RETURN faults, by step. They may name a whole replica."""
        found = (fault for fault in self.faults if fault.kind is FaultKind.RETURN)
        return tuple(sorted(found, key=lambda fault: fault.step))

    def check(self, degrees: Sequence[int]) -> None:
        """Refuse faults at places that the job does not have: they would never happen, and nobody would know why.

        Args:
            degrees: Of the replicas that the job is founded with.

        Raises:
            ConfigError: names the fault.
        """
        for fault in self.faults:
            seat = fault.seat if isinstance(fault.seat, Seat) else Seat(fault.seat, 0)
            if seat.replica >= len(degrees) or seat.index >= degrees[seat.replica]:
                seats = ", ".join(f"r{number}.s0 to s{degree - 1}" for number, degree in enumerate(degrees))
                raise ConfigError(f"faults: {str(fault)!r} never happens: the seats of this job are {seats}")

    def __iter__(self) -> Iterator[Fault]:
        return iter(self.faults)

    def __bool__(self) -> bool:
        return bool(self.faults)

    def __str__(self) -> str:
        return ", ".join(str(fault) for fault in self.faults)


@dataclass(frozen=True)
class FaultActions:
    """What an injector cannot do by itself. A fault whose action is missing is refused.

    Attributes:
        drain: Asks that this member may leave.
        flip: Changes one bit of one parameter's local tensor.
        drop: Lets the member's next write to the store get lost.
    """

    drain: Callable[[], None] | None = None
    flip: Callable[[], None] | None = None
    drop: Callable[[], None] | None = None


@dataclass
class _Countdown:
    fault: Fault
    left: int


class Injector:
    """Lets the faults of one member happen, each once. Any thread of the member may tell it where it is.

    Args:
        faults: From :meth:`FaultPlan.at_seat`.
        actions: For the kinds drain, flip and drop.

    Raises:
        ConfigError: if a fault is a return, or needs an action that is missing.
    """

    def __init__(self, faults: Iterable[Fault], actions: FaultActions | None = None) -> None:
        self._actions = actions or FaultActions()
        self._lock = threading.Lock()  # the main thread and that of the sync both come by
        self._waiting: dict[tuple[int, str], list[_Countdown]] = {}
        for fault in faults:
            self._check(fault)
            self._waiting.setdefault((fault.step, fault.when), []).append(_Countdown(fault, fault.count))

    @property
    def pending(self) -> tuple[Fault, ...]:
        """The faults that have not happened yet."""
        with self._lock:
            return tuple(one.fault for countdowns in self._waiting.values() for one in countdowns)

    def at(self, step: int, moment: str) -> None:
        """The member is at ``moment`` in ``step``: what is due happens before this returns.

        Raises:
            RuntimeError: if that was planned; ``torch.OutOfMemoryError`` is one, too.
        """
        if (step, moment) in self._waiting:  # nearly always not: then this look-up is all it costs
            for fault in self._due(step, moment):
                self._act(fault)

    def _due(self, step: int, moment: str) -> list[Fault]:
        with self._lock:
            countdowns = self._waiting.get((step, moment), [])
            for one in countdowns:
                one.left -= 1
            due = [one.fault for one in countdowns if not one.left]
            self._waiting[step, moment] = [one for one in countdowns if one.left]
            if not self._waiting[step, moment]:
                del self._waiting[step, moment]
        return sorted(due, key=lambda fault: fault.kind in _RAISING)  # else those after it would not happen

    def _act(self, fault: Fault) -> None:
        log.warning("planned fault: %s", fault)
        if fault.kind is FaultKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind is FaultKind.HANG:
            # It stops the whole process, this thread first: sent to the process, another thread would get it, and this
            # one could reach its next collective.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        elif fault.kind is FaultKind.RAISE:
            raise RuntimeError(f"planned fault: {fault}")  # of no subclass: collectives raise none
        elif fault.kind is FaultKind.OOM:
            import torch

            raise torch.OutOfMemoryError(f"CUDA out of memory. Planned fault: {fault}")
        elif fault.kind is FaultKind.SLOW:
            assert fault.argument is not None
            time.sleep(fault.argument)
        else:
            getattr(self._actions, fault.kind.value)()

    def _check(self, fault: Fault) -> None:
        kind = fault.kind.value
        if fault.kind is FaultKind.RETURN:
            raise ConfigError(f"fault {str(fault)!r} is done by whoever leads, not by a member to itself: leave it out")
        if fault.kind in _BY_ACTION and getattr(self._actions, kind) is None:
            raise ConfigError(f"fault {str(fault)!r} cannot be done here: actions.{kind} is not given; leave it out")


def _is_number(value: object, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and at_least <= value < 10**15


def _parse_fault(piece: str) -> Fault:
    """Read one fault. Spaces may stand around every part of it."""
    kind, _, rest = " ".join(piece.split()).partition(" ")
    if not kind:
        raise ConfigError("there is nothing between two commas, or before or after one")
    if kind not in [one.value for one in FaultKind]:
        raise ConfigError(f"{kind!r} is no kind, which are {', '.join(one.value for one in FaultKind)}")
    where, _, argument = re.sub(r" ?([@:#]) ?", r"\1", rest).partition(" ")
    if not where:
        raise ConfigError("it does not say where and when")
    place, at, rest = where.partition("@")
    if not at:
        raise ConfigError(f"{where!r} names no step: write e.g. {place}@20")
    rest, hash_sign, count = rest.partition("#")
    step, colon, moment = rest.partition(":")
    return Fault(
        FaultKind(kind),
        _parse_place(place),
        _parse_number("step", step),
        moment if colon else None,
        _parse_number("count", count) if hash_sign else 1,
        _parse_seconds(argument) if argument else None,
    )


def _parse_place(text: str) -> Seat | int:
    match = _PLACE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is no seat, such as r1.s2, and no replica, such as r1")
    return int(match[1]) if match[2] is None else Seat(int(match[1]), int(match[2]))


def _parse_number(name: str, text: str) -> int:
    if _NUMBER.fullmatch(text) is None:
        raise ConfigError(f"{name} {text!r} is no whole number, such as 20")
    return int(text)


def _parse_seconds(text: str) -> float:
    match = _SECONDS.fullmatch(text)
    if match is None:
        raise ConfigError(f"argument {text!r} is no time in seconds, such as 0.5s")
    return float(match[1])
