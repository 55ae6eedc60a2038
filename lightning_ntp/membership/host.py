"""A launcher's side of membership: it tells of deaths, kills on request, and looks after silent and stuck members.

It trains nothing, so it outlives its members, and as their parent it knows at once when one has ended. The order is
always: kill the member's whole process group, see it gone, then write ``dead``; so no part of a member that counts as
dead holds a socket or a device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from lightning_ntp.config import Timeouts
from lightning_ntp.errors import MembershipError
from lightning_ntp.membership.cleaning import clean
from lightning_ntp.membership.events import Event, Facts, Kind
from lightning_ntp.membership.latest import latest_generation
from lightning_ntp.membership.lease import beat_key, progress_key
from lightning_ntp.membership.progress import Observed, Record, find_hang
from lightning_ntp.membership.store import JobStore
from lightning_ntp.membership.view import View
from lightning_ntp.topology import Seat

log = logging.getLogger(__name__)

_CLEAN_AFTER_S = 1.0  # a recovery is over by then, and the store has nothing else to do


class Host:
    """Looks after the members of one machine, and of others whose launcher cannot be asked.

    Args:
        store: The job's store, for the calling thread.
        seats: Members to look after.
        timeouts: All time limits.
        kill: Kills the process group of a local member; returns whether the seat is local. Its end is then told
            to :meth:`ended`.
        clock: Monotonic, in seconds; for tests.

    Attributes:
        facts: What the event log says.
    """

    def __init__(
        self,
        store: JobStore,
        seats: Sequence[Seat],
        timeouts: Timeouts,
        kill: Callable[[Seat], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.facts = Facts()
        self._store, self._timeouts, self._kill, self._clock = store, timeouts, kill, clock
        self._live: dict[Seat, int] = dict.fromkeys(seats, 0)
        self._beats: dict[Seat, tuple[int, float]] = {}
        self._records: dict[Seat, tuple[Record, float]] = {}
        self._killed: set[tuple[Seat, int]] = set()
        self._looked = self._clock()
        self._stuck_generation = -2
        self._cleaned, self._clean_at = -1, 0.0

    def ended(self, seat: Seat, text: str, incarnation: int | None = None) -> None:
        """Tell everybody that a member has ended, unless it said before that it was done. Its group must be gone."""
        number = self._live.pop(seat, 0) if incarnation is None else incarnation
        self._beats.pop(seat, None)
        self._records.pop(seat, None)
        self._read_events()
        who = (seat, number)
        if who not in self.facts.done and who not in self.facts.gone:
            self._tell(Kind.DEAD, seat, number, text)
        self._store.delete([beat_key(seat, number), progress_key(seat, number)])

    def started(self, seat: Seat, incarnation: int) -> None:
        """Look after a member that was started again."""
        self._live[seat] = incarnation

    def end_job(self, seat: Seat, text: str) -> None:
        """Tell everybody that the job ends."""
        self._tell(Kind.FATAL, seat, self._live.get(seat, 0), text)

    def poll(self) -> None:
        """Read news and look for silent and stuck members; to be called every few milliseconds."""
        self._read_events()
        for who in self.facts.kills - self._killed:
            self._killed.add(who)  # for a member elsewhere, its own launcher hears of it as well
            if self._live.get(who[0]) == who[1]:
                log.warning("%s is killed: it did not leave its collectives in time", who[0])
                self._kill(who[0])
        now = self._clock()
        if now - self._looked < self._timeouts.beat_s:
            return
        if now - self._looked > self._timeouts.lease_s / 2:
            self._forgive(now)  # this process was stopped itself: its watch proves nothing
        self._looked = now
        self._observe(now)
        self._end_silent(now)
        self._end_stuck(now)
        self._clean(now)

    def _read_events(self) -> None:
        while self._store.has_event(self.facts.read):
            self.facts.add(self._store.event(self.facts.read))

    def _observe(self, now: float) -> None:
        for seat, number in self._live.items():
            beats = self._store.count(beat_key(seat, number), 0)
            if beats != self._beats.get(seat, (0, 0.0))[0]:
                self._beats[seat] = (beats, now)
        keys = [progress_key(seat, number) for seat, number in self._live.items()]
        for seat, body in zip(list(self._live), self._store.get_all(keys), strict=True):
            try:
                record = None if body is None else Record.from_json(body)
            except MembershipError as error:
                log.warning("the progress of %s is refused: %s", seat, error)
                continue
            if record is not None and (seat not in self._records or self._records[seat][0] != record):
                self._records[seat] = (record, now)

    def _end_silent(self, now: float) -> None:
        for seat, (_, since) in list(self._beats.items()):
            silent_s, limit_s = now - since, self._timeouts.silence_s
            if (seat, self._live[seat]) in self.facts.left:  # it said so, but its process may not get to its end
                limit_s += self._timeouts.shutdown_grace_s
            if silent_s > limit_s:
                self._end(seat, f"it gave no sign of life for {silent_s:.1f} s")

    def _end_stuck(self, now: float) -> None:
        observed = {
            seat: Observed(record, now - since)
            for seat, (record, since) in self._records.items()
            if (seat, self._live[seat]) not in self.facts.done | self.facts.gone | self.facts.left
        }
        hang = find_hang(observed, self._timeouts)
        if hang is None:
            return
        for seat in hang.culprits:
            who = (seat, self._live[seat])
            if who not in self._killed:
                log.warning("a hang: %s", hang.text)
                self._tell(Kind.KILL, *who, hang.text)  # whoever is its launcher, perhaps this one, kills it
        generation = max(entry.record.generation for entry in observed.values())
        if not hang.culprits and generation > self._stuck_generation:
            self._stuck_generation = generation
            seat = min(observed)
            self._tell(Kind.OVER, seat, self._live[seat], hang.text, generation)

    def _end(self, seat: Seat, text: str) -> None:
        """Kill a silent member, if it is local; else its own lease has ended it by now."""
        who = (seat, self._live[seat])
        if who in self._killed or who in self.facts.gone:
            return
        self._killed.add(who)
        log.warning("%s counts as dead: %s", seat, text)
        if not self._kill(seat):
            self.ended(seat, text)

    def _forgive(self, now: float) -> None:
        """After this process was stopped itself: start to count anew, behind the events that are deleted by now."""
        generation = latest_generation(self._store)
        body = None if generation is None else self._store.get(f"view/{generation}")
        if body is not None and not self._store.has_event(self.facts.read):
            self.facts.read = max(self.facts.read, View.from_json(body).events)
        self._beats = {seat: (beats, now) for seat, (beats, _) in self._beats.items()}
        self._records = {seat: (record, now) for seat, (record, _) in self._records.items()}

    def _clean(self, now: float) -> None:
        generation = latest_generation(self._store)
        if generation is None or generation <= self._cleaned:
            self._clean_at = now + _CLEAN_AFTER_S
            return
        if now >= self._clean_at:
            body = self._store.get(f"view/{generation}")
            if body is not None:
                clean(self._store, View.from_json(body))
            self._cleaned = generation

    def _tell(self, kind: Kind, seat: Seat, incarnation: int, text: str, generation: int = -1) -> None:
        self._store.append(Event(kind, seat, incarnation, generation, text), self.facts.read)
