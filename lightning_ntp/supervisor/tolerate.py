"""The policy of a job that goes on through deaths."""

from __future__ import annotations

import logging
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lightning_ntp.comm.rendezvous import INCARNATION_VARIABLE, SEAT_VARIABLE, TOKEN_VARIABLE
from lightning_ntp.config import Timeouts
from lightning_ntp.errors import ConfigError, LaunchError
from lightning_ntp.membership.exits import MEANINGS, ExitCode
from lightning_ntp.membership.founding import Respawn, next_incarnation
from lightning_ntp.membership.host import Host, newest_view
from lightning_ntp.membership.store import JobStore
from lightning_ntp.membership.whereabouts import tell_host
from lightning_ntp.supervisor.ends import EndPolicy, Job, MemberEnd
from lightning_ntp.supervisor.respawn import Respawner, may_return
from lightning_ntp.topology import Seat

log = logging.getLogger(__name__)

_ENDS_THE_JOB = (ExitCode.SHARDS_LOST, ExitCode.JOB_FAILED)


class TolerateDeaths(EndPolicy):
    """The others go on without a member that has ended, and the job ends well if they finish.

    A member's end is told to the others only when its whole process group is gone; silent, stuck and late members are
    killed first. What the survivors make of it is theirs. The job ends when some member says so (a user's exception),
    when part of the model is lost, or when nobody is left.

    Args:
        seats: Of all members of the job, by rank.
        timeouts: All time limits.
        token: The job's secret; a new one if not given.
        stop_grace_s: Time in seconds that members get to end once a signal has asked the job to stop.
        respawn: Whether a process is started again at a dead member's seat; it then wants to join.
        joins: Whether the members here join a job that runs already.
        clock: Monotonic, in seconds; for tests.
    """

    poll_s = 0.02

    def __init__(
        self,
        seats: Sequence[Seat],
        timeouts: Timeouts,
        token: str | None = None,
        stop_grace_s: float = 30.0,
        respawn: Respawn | None = None,
        *,
        joins: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seats, self.timeouts, self.stop_grace_s = tuple(seats), timeouts, stop_grace_s
        self.token = token or secrets.token_hex(16)
        self._joins, self._respawner = joins, Respawner(respawn or Respawn(), clock)
        self._incarnations = dict.fromkeys(self.seats, 0)

    def member_env(self, rank: int) -> Mapping[str, str]:
        seat = self.seats[rank]
        number = str(self._incarnations[seat])
        return {TOKEN_VARIABLE: self.token, SEAT_VARIABLE: str(seat), INCARNATION_VARIABLE: number}

    def on_start(self, supervisor: Job) -> None:
        store = JobStore(lambda: supervisor.site.connect(self.timeouts.start_s), self.token)
        if supervisor.site.greets:
            store.greet()
        self.begin(supervisor, store)

    def begin(self, supervisor: Job, store: JobStore) -> None:
        """Look after the members here from now on, with a store that is there.

        Raises:
            ConfigError: if the job has another number of members.
        """
        if len(self.seats) != supervisor.node.world_size:
            raise ConfigError(
                f"the script asks for {len(self.seats)} members, but {supervisor.node.world_size} are started: start "
                f"{len(self.seats)} (--nproc-per-node, --nnodes) or change the Trainer's devices"
            )
        self._store, view = store, newest_view(store)
        known = view.incarnations if self._joins and view else dict.fromkeys(self.seats, 0)
        here = [self.seats[rank] for rank in supervisor.node.ranks]
        self.host = Host(
            store,
            () if self._joins else here,
            self.timeouts,
            lambda seat: supervisor.kill_member(self.seats.index(seat)),
            elsewhere={seat: number for seat, number in known.items() if self._joins or seat not in here},
            watches_all=supervisor.site.is_host,
        )
        for seat in here:
            if self._joins:
                self._take_seat(seat)
            else:
                tell_host(store, seat, 0)
            self._respawner.started(seat)

    def on_poll(self, supervisor: Job) -> None:
        self.host.poll()
        if self.host.facts.fatal is not None:
            supervisor.kill_after(self.timeouts.shutdown_grace_s)
        elif not supervisor.stop_signal:
            self._start_again(supervisor)
            if self.host.facts.has_finished:
                self._end_outsiders(supervisor)

    def on_end(self, supervisor: Job, end: MemberEnd) -> None:
        seat = self.seats[end.rank]
        self.host.ended(seat, self._cause(end))
        if supervisor.stop_signal:
            supervisor.kill_after(self.stop_grace_s)
        elif self.host.facts.fatal is None and may_return(end.exit_code):
            text = self._respawner.died(seat)
            if text:
                log.warning("%s", text)

    def waits(self, supervisor: Job) -> bool:
        """Whether a process is still to be started here, into a job that goes on elsewhere."""
        may_start = self._respawner.waits and self.host.facts.fatal is None and not supervisor.stop_signal
        return may_start and bool(self.host.live())

    def exit_code(self, supervisor: Job) -> int:
        fatal, finished = self.host.facts.fatal, [end.exit_code == 0 for end in supervisor.ends]
        # One that left in good order, before the others, does not make the job a finished one.
        if fatal is None and (all(finished) or (any(finished) and self.host.facts.has_finished)):
            return 0
        if supervisor.stop_signal:
            return 128 + supervisor.stop_signal
        own = [end for end in supervisor.ends if end.exit_code != 0 and not end.killed]
        if fatal is not None:  # of whoever ended the job, unless it was stuck on its way out
            return next((end.exit_code for end in own if self.seats[end.rank] == fatal.seat), 1)
        if self._goes_on(supervisor):
            return 0
        own = [end for end in own if end.exit_code != ExitCode.DRAINED] or own  # drains are not why nobody is left
        return own[0].exit_code if own else 128 + signal.SIGKILL

    def note(self, supervisor: Job) -> str:
        fatal = self.host.facts.fatal
        if fatal is not None and supervisor.stop_signal:
            return ""  # members that are interrupted say so
        if fatal is not None:
            # A member that was stuck on its way out has not told it itself.
            is_here = any(self.seats[end.rank] == fatal.seat and not end.killed for end in supervisor.ends)
            told = f" {fatal.last_line} (its traceback is above)" if is_here else f"\n{fatal.text}"
            return f"{fatal.seat} ended the job:{told}"
        left = sorted(self.seats[end.rank] for end in supervisor.ends if end.exit_code == ExitCode.DRAINED)
        lost = [self._cause(end) for end in supervisor.ends if end.exit_code not in (0, ExitCode.DRAINED)]
        parts = [f"handed over and left: {', '.join(map(str, left))}"] if left else []
        parts += [f"lost on the way: {'; '.join(lost)}"] if lost else []
        nobody_left = all(end.exit_code != 0 for end in supervisor.ends) and not supervisor.stop_signal
        if parts and nobody_left and self._goes_on(supervisor):
            parts.append("no member is left here, but the job goes on elsewhere")
        return "; ".join(parts)

    def _goes_on(self, supervisor: Job) -> bool:
        """Whether the job goes on, or has finished, without any member here."""
        if any(end.exit_code in _ENDS_THE_JOB for end in supervisor.ends):
            return False
        return self.host.facts.has_finished or bool(self.host.live())

    def _start_again(self, supervisor: Job) -> None:
        here = {self.seats[rank]: rank for rank in supervisor.node.ranks}
        for seat in self.host.take_returns():
            if seat in here:
                self._respawner.ask(seat)
        for seat in self._respawner.due():
            # Somebody may sit there: the request came too late, or a process was started by hand.
            if here[seat] not in supervisor.running and seat not in self.host.live():
                self._start(supervisor, here[seat])

    def _start(self, supervisor: Job, rank: int) -> None:
        seat = self.seats[rank]
        self._take_seat(seat)
        self._respawner.started(seat)
        log.warning("%s is started again, as incarnation %d", seat, self._incarnations[seat])
        try:
            supervisor.start_member(rank)
        except LaunchError as error:  # this machine may be short of memory; the others go on
            log.warning("%s", error)
            self.host.ended(seat, str(error))

    def _take_seat(self, seat: Seat) -> None:
        self._incarnations[seat] = next_incarnation(self._store, seat)
        self.host.started(seat, self._incarnations[seat])
        tell_host(self._store, seat, self._incarnations[seat])

    def _end_outsiders(self, supervisor: Job) -> None:
        """Once all members have finished, processes that were to join have nobody to join."""
        if not supervisor.running or not self.host.is_finished():
            return
        view = newest_view(self._store)
        for rank in list(supervisor.running):
            seat = self.seats[rank]
            if view is not None and view.incarnations.get(seat) != self._incarnations[seat]:
                supervisor.kill_member(rank)

    def _cause(self, end: MemberEnd) -> str:
        meaning, text = MEANINGS.get(end.exit_code, ""), str(replace(end, seat=str(self.seats[end.rank])))
        return f"{text}: {meaning}" if meaning else text
