"""A member's side of membership: it hears of failures, leaves, agrees on the next view, and finishes with the
others."""

from __future__ import annotations

import atexit
import logging
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lightning_ntp.comm.abort import Abort
from lightning_ntp.comm.progress import Progress
from lightning_ntp.config import Timeouts
from lightning_ntp.errors import Fenced, GenerationOver, JobFailed, MemberLost, MembershipError, ShardsLost
from lightning_ntp.membership.agreement import Standing, admissible
from lightning_ntp.membership.ballot import Round
from lightning_ntp.membership.classify import Verdict, classify
from lightning_ntp.membership.cleaning import clean
from lightning_ntp.membership.events import Event, Facts, Kind, last_words
from lightning_ntp.membership.exits import ExitCode
from lightning_ntp.membership.latest import advance_latest, latest_generation
from lightning_ntp.membership.lease import Lease
from lightning_ntp.membership.progress import AGREEING
from lightning_ntp.membership.states import Course, State
from lightning_ntp.membership.store import JobStore
from lightning_ntp.membership.view import View
from lightning_ntp.membership.watcher import Watcher
from lightning_ntp.topology import Seat

log = logging.getLogger(__name__)

_PAUSE_S = 0.003
_ANNOUNCE_S = 1.0  # a joiner asks again after so long


class Membership:
    """One member among the others. Its methods are for the main thread; two threads of its own watch and give signs.

    A run, seen from the caller::

        membership.start()
        while True:
            try:
                view = membership.agree(standing)     # returns the same view on all its members
                ...                                   # settle view.step, open channels on membership.abort, move state
                membership.run()
                ...                                   # steps; membership.abort.check() before each
                membership.finish()
                break
            except Exception as error:
                membership.leave(error)               # raises the error again if it is this member's own

    Args:
        store: The job's store, for the main thread.
        seat: This member's seat.
        founding: The view that the launcher founds the job with; ``None`` for a joiner.
        incarnation: Which process at this seat: 0, and one more each time that it was started again.
        timeouts: All time limits.
        progress: Where this member is, for whoever looks for a culprit.
        end_process: Ends the process at once; for tests.
        lowest_degree: A replica comes back with so many members at least.

    Attributes:
        view: The newest view that this member has adopted.
        abort: Failure flag of that view's generation.
        course: The states it has gone through.
        has_failed: Whether it has ended the job.
        lease: Its lease.
        is_guest: A joiner before its first step: what fails there ends this process only, never the job.
    """

    def __init__(
        self,
        store: JobStore,
        seat: Seat,
        founding: View | None,
        *,
        incarnation: int = 0,
        timeouts: Timeouts | None = None,
        progress: Progress | None = None,
        end_process: Callable[[int], None] = os._exit,
        lowest_degree: int = 1,
    ) -> None:
        self.seat, self.incarnation = seat, incarnation
        self.timeouts = timeouts or Timeouts()
        self.progress = progress or Progress()
        self.course = Course()
        self._store, self._end_process, self._lowest_degree = store, end_process, lowest_degree
        self._view = founding
        self.is_guest = founding is None
        self._left_at: float | None = None
        self.abort = Abort(-1)
        self.has_failed = False

    @property
    def view(self) -> View:
        if self._view is None:
            raise MembershipError(f"{self.seat} has not been admitted yet: call agree() first")
        return self._view

    @property
    def joiner_waits(self) -> bool:
        """Whether somebody waits for admission; rides in the vote, so that all members agree anew at one step."""
        with self._watcher.lock:
            return bool(admissible(self.view.seats, self._watcher.facts, self._lowest_degree))

    @property
    def is_asked_to_leave(self) -> bool:
        """Whether somebody wants this member to hand over its part and leave."""
        with self._watcher.lock:
            return (self.seat, self.incarnation) in self._watcher.facts.drains

    def start(self) -> None:
        """Begin to watch and to give signs of life.

        Raises:
            MembershipError: if the job speaks another protocol.
        """
        self._store.check_version(self.timeouts.start_s)
        newest = self._newest_view() if self._view is None else None
        start = newest.events if newest else 0
        self._watcher = Watcher(
            self._store.clone(), start, self._react, lambda: self._end_process(int(ExitCode.STORE_LOST))
        )
        self._watcher.start()
        atexit.register(self.close)
        self.lease = Lease(
            self._store.clone(), self.seat, self.incarnation, self.progress, self.timeouts,
            expired=lambda: self._end_process(int(ExitCode.LEASE_EXPIRED)),
        )  # fmt: skip
        self.lease.start()

    def agree(self, standing: Standing) -> View:
        """Wait for the next view, and propose it if it is this member's turn. To be called out of all collectives.

        Args:
            standing: How far this member is. Its ``incarnation`` and ``took_s`` are filled in here.

        Returns:
            The next view, equal on all its members. It may be over already: the first check then says so.

        Raises:
            Fenced: if the others went on without this member.
            JobFailed: if some member has ended the job.
            MembershipError: if no view comes about.
        """
        self.course.to(State.AGREEING)
        self._out_of_collectives()
        took_s = 0.0 if self._left_at is None else time.monotonic() - self._left_at
        standing = replace(standing, incarnation=self.incarnation, took_s=took_s, vote=self._newest_vote(standing))
        view = self._admission(standing) if self._view is None else self._next_view(standing)
        self._adopt(view)
        return view

    def run(self) -> None:
        """The change to the new view is complete: steps begin.

        Raises:
            GenerationOver: if a member of it is gone already.
        """
        self.abort.check()
        self.course.to(State.RUNNING)

    def leave(self, error: Exception) -> None:
        """Come out of a generation after an error: break all groups, tell everybody.

        Raises:
            Exception: ``error`` itself, if it is this member's own: then the job has been told that it ends.
        """
        verdict = classify(error, self.abort, self.progress, self.timeouts.classify_s)
        if verdict is Verdict.LOST:
            raise MemberLost(f"{self.seat}: {type(error).__name__}: {error}: this process ends, the others go on")
        if verdict is Verdict.OWN:
            if not isinstance(error, (Fenced, JobFailed, ShardsLost)):  # of these, the others know or say the same
                self.fail("".join(traceback.format_exception(error)))
            raise error
        self.course.to(State.LEAVING)
        self._out_of_collectives()
        if self._left_at is None:
            self._left_at = time.monotonic()
        text = last_words(str(error))
        if not self.abort.is_set:  # this member saw it first: nobody shall depend on seeing it, too
            self._append(Kind.OVER, text)
        self.abort.set(text)

    def finish(self) -> None:
        """Wait until all members of the view have finished; then nobody needs this one any more.

        Raises:
            GenerationOver: if a member died before it had finished: the others need this one's vote and state.
        """
        self.course.to(State.FINISHING)
        said = self._say("end", True)
        self.progress.enter("finish", self.view.generation)  # who waits here is no culprit
        while not self._store.has(said):
            if self.abort.is_set and self._fate("over") == "over":
                self.abort.check()
            elif self.abort.is_set:
                break
            self._watcher.wait(_PAUSE_S)
        if self._fate("done") != "done":  # decided once: either all have finished, or all agree anew
            self.abort.set("a member died before all had finished")
            self.abort.check()
        self.course.to(State.DONE)
        self._append(Kind.DONE)
        self.close()

    def depart(self) -> None:
        """Leave the others, who have all that this member had: they go on without it, and nothing is broken."""
        self.course.to(State.FINISHING)
        self.course.to(State.DONE)
        self._append(Kind.DONE, "it has handed over its part")
        self.close()

    def exchange(self, name: str, body: Any) -> dict[Seat, Any]:
        """Tell all members of the view something small, and get what they tell; without any channel.

        Args:
            name: What it is about; each name once in a generation.
            body: Plain data.

        Returns:
            What each member said, in rank order.

        Raises:
            GenerationOver: if a member is gone before it said something.
        """
        said = self._say(name, body)
        self.progress.enter(f"exchange {name}", self.view.generation)
        while not self._store.has(said):
            self.abort.check()
            self._watcher.wait(_PAUSE_S)
        self.progress.leave(f"exchange {name}")
        answers = self._store.get_all(said)
        if None in answers:
            raise GenerationOver(f"generation {self.view.generation}: a message about {name!r} was refused")
        return dict(zip(self.view.members, answers, strict=True))

    def fail(self, text: str) -> None:
        """End the job, with a text that everybody gets: a user's exception with its traceback. Once is enough."""
        if not self.has_failed and not self.is_guest:
            self.has_failed = True
            self._append(Kind.FATAL, text)

    def ask_return(self, seat: Seat) -> None:
        """Ask the launcher of a seat to start a process there again."""
        with self._watcher.lock:
            start = self._watcher.facts.read
        self._store.append(Event(Kind.RETURN, seat), start)

    def clean(self) -> None:
        """Delete what older generations left in the store. For the leader, where the store's host runs no launcher."""
        clean(self._store, self.view)

    def close(self) -> None:
        """Say and hear nothing more."""
        if self.course.state is State.ENDED:
            return
        self.course.to(State.ENDED)
        atexit.unregister(self.close)
        self.lease.stop()
        self._watcher.stop(lambda: self._append(Kind.LEFT))

    def _react(self, facts: Facts) -> None:
        """In the watcher's thread, or while adopting a view, with the watcher's lock held."""
        view = self._view
        if view is None or self.abort.is_set:
            return
        gone = [seat for seat in view.members if (seat, view.incarnations[seat]) in facts.gone]
        reason = None
        if facts.fatal is not None:
            reason = f"{facts.fatal.seat} ended the job"
        elif gone:
            reason = ", ".join(f"{seat} is gone ({facts.causes[seat, view.incarnations[seat]]})" for seat in gone)
        elif facts.over >= view.generation:
            reason = facts.over_text
        if reason is not None:
            if self._left_at is None:
                self._left_at = time.monotonic()
            self.abort.set(reason)

    def _out_of_collectives(self) -> None:
        self.progress.waiting.clear()
        self.progress.phase = AGREEING

    def _next_view(self, standing: Standing) -> View:
        attempt = Round(
            self._store, self._watcher, self.view, self.seat, standing, self.timeouts, self._lowest_degree
        )
        attempt.join()
        while True:
            try:
                view = attempt.decided()
            except Fenced as error:
                raise self._fenced(str(error)) from None
            if view is not None:
                return view
            self._check_facts()
            attempt.advance()
            self._watcher.wait(_PAUSE_S)

    def _admission(self, standing: Standing) -> View:
        self._store.put(f"joiner/{self.seat}", replace(standing, fresh=True).to_json())
        announce_at, until = 0.0, time.monotonic() + self.timeouts.start_s
        while True:
            self._check_facts()
            if time.monotonic() >= announce_at:
                self._append(Kind.WAITING)
                announce_at = time.monotonic() + _ANNOUNCE_S
            view = self._newest_view()
            if view is not None and view.incarnations.get(self.seat) == self.incarnation:
                return view
            if view is not None and self._nobody_is_left(view):
                raise self._fenced("the job has ended: nobody is left to join")
            if time.monotonic() > until:
                raise MembershipError(f"{self.seat} was not admitted within start_s={self.timeouts.start_s} s")
            self._watcher.wait(0.02)

    def _nobody_is_left(self, view: View) -> bool:
        with self._watcher.lock:
            ended = self._watcher.facts.gone | self._watcher.facts.done
        return all((seat, view.incarnations[seat]) in ended for seat in view.members)

    def _adopt(self, view: View) -> None:
        if view.incarnations.get(self.seat) != self.incarnation:
            raise self._fenced(f"generation {view.generation} goes on without {self.seat}")
        advance_latest(self._store, view.generation)
        self._watcher.catch_up(view.events, self.timeouts.join_s)
        with self._watcher.lock:
            self._view, self.abort, self._left_at = view, Abort(view.generation), None
            self.progress.reset(view.generation)
            facts = self._watcher.facts
            facts.waiting.clear()  # admitted, or not to be admitted; who came too late for this view asks again
            self.course.to(State.CHANGING)
            self._react(facts)

    def _check_facts(self) -> None:
        with self._watcher.lock:
            fatal, gone = self._watcher.facts.fatal, self._watcher.facts.gone
            is_gone = (self.seat, self.incarnation) in gone
        if fatal is not None:
            raise JobFailed(f"{fatal.seat} ended the job: {fatal.last_line}")
        if is_gone:
            raise self._fenced(f"the others take {self.seat} for dead")

    def _fenced(self, text: str) -> Fenced:
        self.course.to(State.FENCED)
        return Fenced(f"{text}: end this process; its launcher may start it again")

    def _newest_vote(self, standing: Standing) -> Mapping[str, Any] | None:
        """A vote that was decided for this member by its last view counts as if it had passed it."""
        known = None if self._view is None else self._view.vote
        if known is None or (standing.vote is not None and standing.vote["step"] >= known["step"]):
            return standing.vote
        return known

    def _newest_view(self) -> View | None:
        generation = latest_generation(self._store)
        body = None if generation is None else self._store.get(f"view/{generation}")
        return None if body is None else View.from_json(body)

    def _say(self, name: str, body: Any) -> list[str]:
        prefix = f"say/{self.view.generation}/{name}"
        self._store.put(f"{prefix}/{self.seat}", body)
        return [f"{prefix}/{seat}" for seat in self.view.members]

    def _fate(self, wish: str) -> str:
        return self._store.decide(f"say/{self.view.generation}/fate", wish)

    def _append(self, kind: Kind, text: str = "") -> None:
        with self._watcher.lock:
            start = self._watcher.facts.read
        generation = -1 if self._view is None else self._view.generation
        self._store.append(Event(kind, self.seat, self.incarnation, generation, text), start)
