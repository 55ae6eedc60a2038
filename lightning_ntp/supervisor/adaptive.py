"""The policy of a supervisor that does not know the script: all or nothing, until the members say what the job is."""

from __future__ import annotations

import logging
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch.distributed as dist

from lightning_ntp.comm.rendezvous import INCARNATION_VARIABLE, TOKEN_VARIABLE
from lightning_ntp.errors import LaunchError, NTPError
from lightning_ntp.membership.exits import ExitCode
from lightning_ntp.membership.founding import Founding
from lightning_ntp.membership.store import JobStore
from lightning_ntp.supervisor.access import Access
from lightning_ntp.supervisor.ends import AllOrNothing, EndPolicy, Job, MemberEnd
from lightning_ntp.supervisor.guard import StoreGuard
from lightning_ntp.supervisor.nodes import Failure, Nodes
from lightning_ntp.supervisor.tolerate import TolerateDeaths

log = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_S = 0.05
_START_S = 300.0  # of a job that has not said what its limits are
_NODE_SILENCE_S = 30.0


class Adaptive(EndPolicy):
    """One failed member ends the job, until the job is known to be fault tolerant; from then on deaths are tolerated.

    A script that uses no Trainer, or a Trainer without fault tolerance, never says so. Then a failure on one of several
    nodes ends the members of all. The supervisor that hosts the store stays until all others have ended; when the store
    is gone, everybody ends.

    Args:
        token: The job's secret; a new one if not given.
        founding: What the job is, where the supervisor knows it before the members do: then deaths are tolerated from
            the first moment.
        grace_s: While nothing is tolerated: time in seconds from a failure to the kill of the rest.
        stop_grace_s: Time in seconds that members get to end once a signal has asked the job to stop.
        joins: Whether the members here join a job that runs already.
        clock: Monotonic, in seconds; for tests.

    Attributes:
        tolerant: What decides once the job is known to be fault tolerant; ``None`` before.
    """

    def __init__(
        self,
        token: str | None = None,
        founding: Founding | None = None,
        *,
        grace_s: float = AllOrNothing.grace_s,
        stop_grace_s: float = AllOrNothing.stop_grace_s,
        joins: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.token, self._makes_token = token or secrets.token_hex(16), not token
        self.tolerant: TolerateDeaths | None = None
        self._founding, self._joins, self._clock = founding, joins, clock
        self._rigid = AllOrNothing(grace_s, stop_grace_s)
        self._nodes: Nodes | None = None
        self._guard: StoreGuard | None = None
        self._access: Access | None = None
        self._failure: Failure | None = None
        self._is_lost, self._leave_at = False, None

    @property
    def poll_s(self) -> float:
        return _LOOK_S if self.tolerant is None else self.tolerant.poll_s

    def member_env(self, rank: int) -> Mapping[str, str]:
        known = self.tolerant.member_env(rank) if self.tolerant else {}
        return {TOKEN_VARIABLE: self.token, INCARNATION_VARIABLE: "0", **known}

    def on_start(self, supervisor: Job) -> None:
        try:
            self._start(supervisor)
        except NTPError:
            raise
        except RuntimeError as error:
            text = str(error).splitlines()[0]
            raise LaunchError(f"the store at {supervisor.site.address} cannot be used: {text}") from None

    def on_poll(self, supervisor: Job) -> None:
        self._reach(supervisor, lambda: self._poll(supervisor), None)

    def on_end(self, supervisor: Job, end: MemberEnd) -> None:
        self._reach(supervisor, lambda: self._take_in(supervisor, end), None)

    def waits(self, supervisor: Job) -> bool:
        return self._reach(supervisor, lambda: self._waits(supervisor), False)

    def exit_code(self, supervisor: Job) -> int:
        finished = [end.exit_code == 0 for end in supervisor.ends]
        if_lost = 0 if (any(finished) if self.tolerant else all(finished)) else int(ExitCode.STORE_LOST)
        return self._reach(supervisor, lambda: self._exit_code(supervisor), if_lost)

    def note(self, supervisor: Job) -> str:
        text = f"the job's store at {supervisor.site.address} is gone, and with it the job"
        is_lost = self._is_lost and self.exit_code(supervisor) != 0
        return self._reach(supervisor, lambda: self._note(supervisor), text if is_lost else "")

    def on_finish(self, supervisor: Job, exit_code: int | None) -> None:
        if self._nodes is not None:
            self._reach(supervisor, lambda: self._say_end(self._nodes, exit_code), None)
        if self._guard is not None:
            self._guard.stop()
        if self._access is not None:
            self._access.close()

    def _start(self, supervisor: Job) -> None:
        site, node = supervisor.site, supervisor.node
        self._store = JobStore(lambda: site.connect(_START_S), self.token)
        if site.greets:
            self._store.greet()
        self._store.check_version(_START_S)
        if not node.is_shim:
            nodes = Nodes(self._store, node, looks=site.is_host or node.index == 0, clock=self._clock)
            nodes.register()
            self._nodes = nodes
        if not site.is_host:
            self._guard = StoreGuard(self._patience_s, supervisor.kill, site.address)
            self._guard.start()
        if self._founding is not None:
            self._founding.declare(self._store)
        self._look(supervisor, ())

    def _poll(self, supervisor: Job) -> None:
        self._look(supervisor, supervisor.ends)
        if self.tolerant is not None:
            self.tolerant.on_poll(supervisor)
        if self._nodes is not None and self._nodes.poll():
            self._follow_others(supervisor, self._nodes)

    def _take_in(self, supervisor: Job, end: MemberEnd) -> None:
        self._look(supervisor, supervisor.ends[:-1])
        if self.tolerant is not None:
            self.tolerant.on_end(supervisor, end)
            return
        self._rigid.on_end(supervisor, end)
        if end.exit_code != 0 and self._nodes is not None:
            self._nodes.fail(end.exit_code, str(end))
            self._follow_others(supervisor, self._nodes)

    def _look(self, supervisor: Job, earlier: Sequence[MemberEnd]) -> None:
        """Whether the members have said by now what the job is; not once one has failed."""
        if self.tolerant is not None or self._failure or any(end.exit_code != 0 for end in earlier):
            return
        founding = Founding.read(self._store)
        if founding is None:
            return
        tolerant = TolerateDeaths(
            founding.members, founding.timeouts, self.token, self._rigid.stop_grace_s, founding.respawn,
            joins=self._joins, clock=self._clock,
        )  # fmt: skip
        tolerant.begin(supervisor, self._store)
        for end in earlier:  # well, but before the job began: the others must not wait for it
            tolerant.host.ended(founding.members[end.rank], str(end))
        self.tolerant = tolerant
        if self._makes_token or supervisor.site.is_host:
            self._access = Access(supervisor.site.address, self.token if self._makes_token else None)
            self._access.open()

    def _follow_others(self, supervisor: Job, nodes: Nodes) -> None:
        """What has happened on other nodes, as far as the event log does not tell it."""
        if self.tolerant is None and not supervisor.stop_signal:
            for lost in sorted(nodes.silent(_NODE_SILENCE_S))[:1]:
                self._failure = Failure(lost, 1, f"its supervisor gave no sign of life for {_NODE_SILENCE_S:.0f} s")
                nodes.fail(1, f"node {lost}: {self._failure.text}")
        self._failure = self._failure or nodes.failure()
        if self._failure is not None:
            supervisor.kill_after(self._rigid.grace_s)

    def _waits(self, supervisor: Job) -> bool:
        if self.tolerant is not None and self.tolerant.waits(supervisor):
            return True
        if not supervisor.site.is_host or self._nodes is None:
            return False
        limit_s = self.tolerant.timeouts.silence_s if self.tolerant else _NODE_SILENCE_S
        others = set(self._nodes.running()) - self._nodes.silent(limit_s)
        if not others or not supervisor.stop_signal:
            return bool(others)
        if self._leave_at is None:
            self._leave_at = self._clock() + self._rigid.grace_s
            self._stop_others(supervisor, self._nodes)
        return self._clock() < self._leave_at

    def _stop_others(self, supervisor: Job, nodes: Nodes) -> None:
        text = f"the supervisor with the job's store was stopped by {signal.Signals(supervisor.stop_signal).name}"
        if self.tolerant is not None:
            self.tolerant.host.end_job(self.tolerant.seats[supervisor.node.ranks[0]], text)
        nodes.fail(128 + supervisor.stop_signal, text)

    def _exit_code(self, supervisor: Job) -> int:
        if self._leave_at is not None:
            return 128 + supervisor.stop_signal
        if self._failure is not None:
            return self._failure.exit_code
        return (self.tolerant or self._rigid).exit_code(supervisor)

    def _note(self, supervisor: Job) -> str:
        if self._leave_at is not None:
            return ""
        if self._failure is not None:
            return f"node {self._failure.node}: {self._failure.text}"
        return (self.tolerant or self._rigid).note(supervisor)

    def _say_end(self, nodes: Nodes, exit_code: int | None) -> None:
        if exit_code is None and self.tolerant is None:
            nodes.fail(1, "its supervisor ended by an error of its own")
        nodes.end()

    def _patience_s(self) -> float:
        limits = self.tolerant.timeouts if self.tolerant else None
        return limits.silence_s + limits.shutdown_grace_s if limits else _START_S

    def _reach(self, supervisor: Job, action: Callable[[], T], if_lost: T) -> T:
        """Do something with the store; once its host is gone, nothing is left to decide."""
        if self._is_lost:
            return if_lost
        try:
            return action()
        except NTPError:
            raise
        except RuntimeError as error:
            if not isinstance(error, dist.DistError):
                log.error("the store at %s: %s", supervisor.site.address, error)
            self._is_lost = True
            supervisor.kill_after(self.tolerant.timeouts.shutdown_grace_s if self.tolerant else self._rigid.grace_s)
            return if_lost
        finally:
            if self._guard is not None:
                self._guard.tick()
