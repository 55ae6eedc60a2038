"""A launcher's side of membership: it tells of deaths, kills on request, and looks after silent and stuck members.

It trains nothing, so it outlives its members, and as their parent it knows at once when one has ended. The order is
always: kill the member's whole process group, see it gone, then write ``dead``; so no part of a member that counts as
dead holds a socket or a device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping

from lightning_ntp.config import Timeouts
from lightning_ntp.errors import MembershipError
from lightning_ntp.membership.cleaning import clean
from lightning_ntp.membership.events import Event, Facts, Kind
from lightning_ntp.membership.latest import latest_generation
from lightning_ntp.membership.lease import beat_key, progress_key
from lightning_ntp.membership.progress import Observed, Record, find_hang
from lightning_ntp.membership.store import JobStore
from lightning_ntp.membership.view import View
from lightning_ntp.membership.whereabouts import host_key
from lightning_ntp.topology import Seat

log = logging.getLogger(__name__)

_CLEAN_AFTER_S = 1.0  # a recovery is over by then, and the store has nothing else to do


class Host:
    """Looks after the members of one machine, and, if it is its turn, of all others.

    Of the members here it hears from their parent. Members elsewhere it knows by their signs of life alone: one that is
    silent for longer than its lease and the margin has been ended by its lease, also where its whole machine is gone.
    One launcher watches everybody: the store's host, or else the launcher of the lowest live seat. Every other one
    watches that seat, so that the next one takes over.

    Args:
        store: The job's store, for the calling thread.
        seats: Members to look after here, each with incarnation 0; :meth:`started` tells of others.
        timeouts: All time limits.
        kill: Kills the process group of a local member; returns whether the seat is local. Its end is then told
            to :meth:`ended`.
        clock: Monotonic, in seconds; for tests.
        elsewhere: Members that other launchers have started, with their incarnations.
        watches_all: Whether this is the store's host.

    Attributes:
        facts: What the event log says.
    """

    def __init__(
        self,
        store: JobStore,
        seats: Collection[Seat],
        timeouts: Timeouts,
        kill: Callable[[Seat], bool],
        clock: Callable[[], float] = time.monotonic,
        *,
        elsewhere: Mapping[Seat, int] | None = None,
        watches_all: bool = True,
    ) -> None:
        view = newest_view(store)
        self.facts = Facts(read=view.events if view else 0)
        self._store, self._timeouts, self._kill, self._clock = store, timeouts, kill, clock
        self._here = set(seats)
        self._first = {**(elsewhere or {}), **dict.fromkeys(seats, 0)}
        self._live = dict(self._first)
        self._watches_all, self._num_taken = watches_all, 0
        self._beats: dict[Seat, tuple[int, float]] = {}
        self._records: dict[Seat, tuple[Record, float]] = {}
        self._killed: set[tuple[Seat, int]] = set()
        self._looked = self._clock()
        self._stuck_generation = -2
        self._cleaned, self._clean_at = -1, 0.0
        self._old: list[tuple[float, str]] = []

    def ended(self, seat: Seat, text: str) -> None:
        """Tell everybody that a member has ended, unless it said before that it was done. Its group must be gone."""
        number = self._live.get(seat, 0)
        self._here.discard(seat)
        self._forget(seat)
        self._read_events()
        who = (seat, number)
        if who not in self.facts.done and who not in self.facts.gone:
            self._tell(Kind.DEAD, seat, number, text)
            self._read_events()
        # Later: another launcher may be reading them at this moment, and would wait for keys that have gone.
        keys = beat_key(seat, number), progress_key(seat, number), host_key(seat, number)
        self._old += [(self._clock(), key) for key in keys]

    def started(self, seat: Seat, incarnation: int) -> None:
        """Look after a process that was started here at a seat."""
        self._forget(seat)
        self._here.add(seat)
        self._live[seat] = incarnation

    def live(self) -> set[Seat]:
        """Seats of the newest view (before the first: of the start) whose members have neither died nor finished."""
        view = newest_view(self._store)
        ended = self.facts.gone | self.facts.done
        return {seat for seat, n in (view.incarnations if view else self._first).items() if (seat, n) not in ended}

    def is_finished(self) -> bool:
        """Whether the job has: its members have finished, so nobody is left that could take in another one."""
        return self.facts.has_finished and not self.live()

    def take_returns(self) -> list[Seat]:
        """Seats at which somebody has asked for a new process since the last call."""
        new = self.facts.returns[self._num_taken :]
        self._num_taken += len(new)
        return new

    def end_job(self, seat: Seat, text: str) -> None:
        """Tell everybody that the job ends."""
        self._tell(Kind.FATAL, seat, self._live.get(seat, 0), text)
        self._read_events()

    def poll(self) -> None:
        """Read news and look for silent and stuck members; to be called every few milliseconds."""
        self._read_events()
        for who in self.facts.kills - self._killed:
            self._killed.add(who)  # for a member elsewhere, its own launcher hears of it as well
            if who[0] in self._here and self._live[who[0]] == who[1]:
                log.warning("%s is killed: it did not leave its collectives in time", who[0])
                self._kill(who[0])
        now = self._clock()
        if now - self._looked < self._timeouts.beat_s:
            return
        if now - self._looked > self._timeouts.lease_s / 2:
            self._forgive(now)  # this process was stopped itself: its watch proves nothing
        self._looked = now
        self._store.delete([key for since, key in self._old if now - since > _CLEAN_AFTER_S])
        self._old = [(since, key) for since, key in self._old if now - since <= _CLEAN_AFTER_S]
        watches_all, watched = self._watched()
        self._observe(watched, now)
        self._end_silent(now)
        if watches_all:
            self._end_stuck(now)
            self._clean(now)

    def _read_events(self) -> None:
        while self._store.has_event(self.facts.read):
            event = self._store.event(self.facts.read)
            self.facts.add(event)
            if event is not None:
                self._follow(event)

    def _follow(self, event: Event) -> None:
        """Who is where elsewhere. Of the members here only their parent's word counts."""
        seat, number = event.seat, event.incarnation
        if seat in self._here:
            return
        known = self._live.get(seat, -1)
        if event.kind in (Kind.DEAD, Kind.EXPELLED, Kind.DONE) and known == number:
            self._forget(seat)
        elif event.kind is Kind.WAITING and number > known and (seat, number) not in self.facts.gone:
            self._forget(seat)
            self._live[seat] = number

    def _forget(self, seat: Seat) -> None:
        for known in (self._live, self._beats, self._records):
            known.pop(seat, None)

    def _watched(self) -> tuple[bool, list[Seat]]:
        """Whether it is this launcher's turn to watch all members, and whom it watches."""
        ended = self.facts.gone | self.facts.done
        live = [seat for seat, number in self._live.items() if (seat, number) not in ended]
        # A member here that others took for dead is watched on: it may be stopped, and then nobody else ends it.
        here = [seat for seat in self._here if (seat, self._live[seat]) not in self.facts.done]
        if self._watches_all or not live or min(live) in self._here:
            return True, sorted({*live, *here})
        return False, sorted({min(live), *here})

    def _observe(self, watched: Collection[Seat], now: float) -> None:
        self._beats = {seat: known for seat, known in self._beats.items() if seat in watched}
        self._records = {seat: known for seat, known in self._records.items() if seat in watched}
        numbers = {seat: self._live[seat] for seat in watched}
        for seat, number in numbers.items():
            beats = self._store.count(beat_key(seat, number), 0)
            if beats != self._beats.get(seat, (0, 0.0))[0]:
                self._beats[seat] = (beats, now)
        keys = [progress_key(seat, number) for seat, number in numbers.items()]
        for seat, body in zip(watched, self._store.get_all(keys), strict=True):
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
        if who in self._killed:
            return
        self._killed.add(who)
        log.warning("%s counts as dead: %s", seat, text)
        if not self._kill(seat):
            self.ended(seat, text)

    def _forgive(self, now: float) -> None:
        """After this process was stopped itself: start to count anew, behind the events that are deleted by now."""
        view = newest_view(self._store)
        if view is not None and not self._store.has_event(self.facts.read):
            self.facts.read = max(self.facts.read, view.events)
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


def newest_view(store: JobStore) -> View | None:
    """The newest view that a member has adopted; ``None`` before the first."""
    generation = latest_generation(store)
    body = None if generation is None else store.get(f"view/{generation}")
    return None if body is None else View.from_json(body)
