"""The policy of a job that goes on through deaths."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable, Mapping, Sequence

from lightning_ntp.comm.rendezvous import connect_store
from lightning_ntp.config import Timeouts
from lightning_ntp.errors import ConfigError
from lightning_ntp.membership.exits import MEANINGS, ExitCode
from lightning_ntp.membership.host import Host
from lightning_ntp.membership.store import JobStore
from lightning_ntp.supervisor.ends import EndPolicy, Job, MemberEnd
from lightning_ntp.topology import Seat

TOKEN_VARIABLE, SEAT_VARIABLE, INCARNATION_VARIABLE = "NTP_TOKEN", "NTP_SEAT", "NTP_INCARNATION"
"""How a member learns the job's secret, its seat, and which process at that seat it is."""


class TolerateDeaths(EndPolicy):
    """The others go on without a member that has ended, and the job ends well if they finish.

    A member's end is told to the others only when its whole process group is gone; silent, stuck and late members are
    killed first. What the survivors make of it is theirs. The job ends when some member says so (a user's exception),
    when part of the model is lost, or when nobody is left.

    Args:
        seats: Of the members, by rank.
        timeouts: All time limits.
        token: The job's secret; a new one if not given.
        stop_grace_s: Time in seconds that members get to end once a signal has asked the job to stop.
        respawn: Asked after every death whether to start a process at that seat again, which then wants to join.
    """

    poll_s = 0.005

    def __init__(
        self,
        seats: Sequence[Seat],
        timeouts: Timeouts,
        token: str | None = None,
        stop_grace_s: float = 30.0,
        respawn: Callable[[MemberEnd], bool] | None = None,
    ) -> None:
        self.seats, self.timeouts, self.stop_grace_s = tuple(seats), timeouts, stop_grace_s
        self.token = token or secrets.token_hex(16)
        self._respawn = respawn
        self._incarnations = [0] * len(self.seats)

    def member_env(self, rank: int) -> Mapping[str, str]:
        number = str(self._incarnations[rank])
        return {TOKEN_VARIABLE: self.token, SEAT_VARIABLE: str(self.seats[rank]), INCARNATION_VARIABLE: number}

    def on_start(self, supervisor: Job) -> None:
        if len(self.seats) != supervisor.num_members:
            raise ConfigError(f"seats={len(self.seats)} for num_members={supervisor.num_members}: name a seat for each")
        env = supervisor.member_env(0)
        store = JobStore(lambda: connect_store(env, self.timeouts.start_s), self.token)
        store.greet()
        self.host = Host(store, self.seats, self.timeouts, lambda seat: supervisor.kill_member(self.seats.index(seat)))

    def on_poll(self, supervisor: Job) -> None:
        self.host.poll()
        if self.host.facts.fatal is not None:
            supervisor.kill_after(self.timeouts.shutdown_grace_s)

    def on_end(self, supervisor: Job, end: MemberEnd) -> None:
        self.host.ended(self.seats[end.rank], self._cause(end))
        if supervisor.stop_signal:
            supervisor.kill_after(self.stop_grace_s)
        elif self._may_return(end):
            self._incarnations[end.rank] += 1
            self.host.started(self.seats[end.rank], self._incarnations[end.rank])
            supervisor.start_member(end.rank)

    def _may_return(self, end: MemberEnd) -> bool:
        if self._respawn is None or self.host.facts.fatal is not None:
            return False
        return end.exit_code not in (0, ExitCode.SHARDS_LOST, ExitCode.JOB_FAILED) and self._respawn(end)

    def exit_code(self, supervisor: Job) -> int:
        fatal = self.host.facts.fatal
        if fatal is None and any(end.exit_code == 0 for end in supervisor.ends):
            return 0
        if supervisor.stop_signal and fatal is None:
            return 128 + supervisor.stop_signal
        own = [end for end in supervisor.ends if end.exit_code != 0 and not end.killed]
        if fatal is not None:  # of whoever ended the job, unless it was stuck on its way out
            return next((end.exit_code for end in own if self.seats[end.rank] == fatal.seat), 1)
        return own[0].exit_code if own else 128 + signal.SIGKILL

    def note(self, supervisor: Job) -> str:
        fatal = self.host.facts.fatal
        if fatal is not None:
            return f"{fatal.seat} ended the job:\n{fatal.text}"
        lost = [self._cause(end) for end in supervisor.ends if end.exit_code != 0]
        return f"lost on the way: {'; '.join(lost)}" if lost else ""

    @staticmethod
    def _cause(end: MemberEnd) -> str:
        meaning = MEANINGS.get(end.exit_code, "")
        return f"{end}: {meaning}" if meaning else str(end)
