"""One attempt to agree on one view, through the store."""

from __future__ import annotations

import logging
import time

from lightning_ntp.config import Timeouts
from lightning_ntp.errors import Fenced, MembershipError
from lightning_ntp.membership.agreement import Standing, admissible, late_member, next_view
from lightning_ntp.membership.events import Event, Kind
from lightning_ntp.membership.latest import latest_generation
from lightning_ntp.membership.store import JobStore
from lightning_ntp.membership.view import View
from lightning_ntp.membership.watcher import Watcher
from lightning_ntp.topology import Seat

log = logging.getLogger(__name__)

_TURN_S = 0.02  # how much later each next member proposes, if the one before it did not
_LOOK_FOR_LATEST_S = 0.25


class Round:
    """Joins a generation, waits for the others, and proposes the view.

    Any veteran may propose, as the first proposal is everybody's; they take turns only to save work.

    Args:
        store: Of the calling thread.
        watcher: Knows the deaths.
        before: The view that has ended.
        seat: This member.
        standing: Its join record.
        timeouts: ``join_s``, and the silence after which a late member is given up.
        lowest_degree: A replica comes back with so many members at least.
    """

    def __init__(
        self,
        store: JobStore,
        watcher: Watcher,
        before: View,
        seat: Seat,
        standing: Standing,
        timeouts: Timeouts,
        lowest_degree: int = 1,
    ) -> None:
        self._store, self._watcher, self._before = store, watcher, before
        self._seat, self._standing, self._timeouts = seat, standing, timeouts
        self._lowest_degree = lowest_degree
        self._generation = before.generation + 1
        self._began = self._looked = time.monotonic()
        self._ready_since: float | None = None
        self._told: set[tuple[Kind, Seat]] = set()

    def join(self) -> None:
        """Say that this member is out of all collectives, and where it stands."""
        self._store.put(self._key(self._seat), self._standing.to_json())

    def decided(self) -> View | None:
        """The view, once there is one.

        Raises:
            Fenced: if it was decided so long ago that it is deleted.
        """
        body = self._store.get(f"view/{self._generation}")
        if body is not None:
            return View.from_json(body)
        if time.monotonic() - self._looked > _LOOK_FOR_LATEST_S:
            self._looked = time.monotonic()
            latest = latest_generation(self._store)
            is_past = latest is not None and latest >= self._generation
            if is_past and not self._store.has([f"view/{self._generation}"]):
                raise Fenced(f"{self._seat} asks for generation {self._generation}, but the job is at {latest}")
        return None

    def advance(self) -> None:
        """Propose if all live veterans have joined; deal with those who do not.

        Raises:
            MembershipError: if no view can come about.
        """
        live = self._live()
        if live and self._store.has([self._key(seat) for seat in live]):
            if self._is_my_turn(live):
                self._propose(live)
            return
        self._ready_since = None
        waited_s = time.monotonic() - self._began
        limit_s = self._timeouts.start_s if self._before.generation < 0 else self._timeouts.join_s
        if waited_s > limit_s:
            self._press(live, waited_s > limit_s + self._timeouts.silence_s)

    def _live(self) -> list[Seat]:
        with self._watcher.lock:
            facts = self._watcher.facts
            return [
                seat
                for seat in self._before.members
                if (who := (seat, self._before.incarnations[seat])) not in facts.gone and who not in facts.done
            ]

    def _is_my_turn(self, live: list[Seat]) -> bool:
        now = time.monotonic()
        self._ready_since = now if self._ready_since is None else self._ready_since
        return self._seat in live and now - self._ready_since >= _TURN_S * live.index(self._seat)

    def _propose(self, live: list[Seat]) -> None:
        with self._watcher.lock:
            events = self._watcher.facts.read  # before the records are read: what is later, the new view hears of
        veterans = self._standings([(seat, self._key(seat)) for seat in live])
        if set(veterans) != set(live):
            return  # a record was refused; its writer is treated as late
        if len(live) == len(self._before.members):
            late = late_member(self._before, veterans, self._timeouts.lease_margin_s)
            if late is not None:
                text = f"{self._before.fruitless} generations ended without a step, and it was the last to leave them"
                self._tell(Kind.EXPELLED, late, text)
                return
        joiners = self._joiners(live) if all(standing.admits for standing in veterans.values()) else {}
        view = next_view(self._before, veterans, joiners, events)
        self._store.decide(f"view/{self._generation}", view.to_json())

    def _joiners(self, live: list[Seat]) -> dict[Seat, Standing]:
        with self._watcher.lock:
            stay = tuple(tuple(seat for seat in replica if seat in live) for replica in self._before.seats)
            waiting = admissible(stay, self._watcher.facts, self._lowest_degree)
        found = self._standings([(seat, f"joiner/{seat}") for seat in waiting])
        return {seat: s for seat, s in found.items() if s.fresh and s.incarnation == waiting[seat]}

    def _standings(self, keys: list[tuple[Seat, str]]) -> dict[Seat, Standing]:
        found = {}
        for (seat, key), body in zip(keys, self._store.get_all([key for _, key in keys]), strict=True):
            try:
                if body is not None:
                    found[seat] = Standing.from_json(body)
            except MembershipError as error:
                log.warning("the record %r is refused: %s", key, error)
        return found

    def _press(self, live: list[Seat], give_up: bool) -> None:
        """Have the late ones killed; if nobody answers (their launcher is gone, too), go on without them."""
        joined = [seat for seat in live if self._store.has([self._key(seat)])]
        if joined[:1] != [self._seat]:
            return
        for seat in live:
            if seat not in joined:
                text = f"it lives, but did not leave generation {self._before.generation} in time"
                self._tell(Kind.EXPELLED if give_up else Kind.KILL, seat, text)

    def _tell(self, kind: Kind, seat: Seat, text: str) -> None:
        if (kind, seat) in self._told:
            return
        self._told.add((kind, seat))
        with self._watcher.lock:
            start = self._watcher.facts.read
        incarnation = self._before.incarnations[seat]
        self._store.append(Event(kind, seat, incarnation, self._before.generation, text), start)

    def _key(self, seat: Seat) -> str:
        return f"join/{self._generation}/{seat}"
