"""When a process is started again at the seat of one that has died."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_ntp.membership.exits import ExitCode
from lightning_ntp.membership.founding import Respawn
from lightning_ntp.topology import Seat

_HOUR_S = 3600.0
_LAST_SIGNAL = 64
_MAY_RETURN = (ExitCode.LEASE_EXPIRED, ExitCode.FENCED, ExitCode.MEMBER_LOST)


@dataclass
class _Record:
    """Of one seat: when its process was started, and when it was to be started again (on the clock)."""

    started: float
    tries: list[float] = field(default_factory=list)
    total: int = 0
    delay_s: float = 0.0


class Respawner:
    """Keeps the back-off of every seat. It starts nothing: :meth:`due` names what to start.

    Args:
        settings: Mode, delays and limit.
        clock: Monotonic, in seconds; for tests.
    """

    def __init__(self, settings: Respawn, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self._records: dict[Seat, _Record] = {}
        self._due: dict[Seat, float] = {}

    @property
    def waits(self) -> bool:
        """Whether a process will be started later."""
        return bool(self._due)

    def started(self, seat: Seat) -> None:
        """A process was started at a seat."""
        self._due.pop(seat, None)
        self._records.setdefault(seat, _Record(0.0)).started = self._clock()

    def died(self, seat: Seat) -> str:
        """The process at a seat has died, in a way after which it may come back; returns what follows, for the reader.

        Nothing is said where processes never come back.
        """
        settings, now = self._settings, self._clock()
        record = self._records.setdefault(seat, _Record(now))
        record.tries = [at for at in record.tries if now - at < _HOUR_S]
        if settings.mode == "never":
            return ""
        if settings.mode == "once" and record.total:
            return f"{seat} was started again once, as respawn='once' says, and stays dead"
        if len(record.tries) >= settings.tries_per_hour:
            return f"{seat} died after {len(record.tries)} new starts within an hour, and stays dead"
        begins_anew = not record.total or now - record.started >= settings.steady_s
        delay_s = settings.first_delay_s if begins_anew else 2 * record.delay_s
        record.delay_s = min(delay_s, settings.longest_delay_s)
        record.total += 1
        record.tries.append(now)
        self._due[seat] = now + record.delay_s
        return f"{seat} is started again in {record.delay_s:.1f} s"

    def ask(self, seat: Seat) -> None:
        """Somebody wants a process there at once, whatever the mode."""
        self._due[seat] = self._clock()

    def due(self) -> list[Seat]:
        """Seats at which to start a process now; each is named once."""
        ripe = [seat for seat, at in self._due.items() if at <= self._clock()]
        for seat in ripe:
            del self._due[seat]
        return ripe


def may_return(exit_code: int) -> bool:
    """Whether a member that ended so may come back: a signal or the others' silence ended it, not its own code."""
    return 128 < exit_code <= 128 + _LAST_SIGNAL or exit_code in _MAY_RETURN
