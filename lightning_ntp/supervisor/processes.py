"""The supervisor: one process that starts members of a job on this machine, and waits for them. It may host the store.

It trains nothing and is no rank. So it outlives any member, it can tell how each of them ended, and the store stays
where the survivors can reach it.

*Members are process groups.* Every member leads a session of its own. When it ends, whatever is left of its group
(DataLoader workers, which would go on holding its sockets and its GPU) is killed before the end is told to anybody.

*Signals.* A terminal's Ctrl-C reaches only the supervisor. SIGINT goes on to the members' whole groups, as a terminal
would send it; a second one kills. SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 go to the members alone: a DataLoader worker
that dies of SIGTERM would break the member's own orderly end. A signal that the caller ignores (``nohup``) stays
ignored.

*No orphans.* The kernel kills a member when the supervisor is gone, even by SIGKILL; the member's DataLoader workers
notice within seconds that their parent is gone.

What the end of a member means for the others is not decided here but by an :class:`EndPolicy`. Where the other
members of the job and its store are, a :class:`Node` and a :class:`StoreSite` say.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

from lightning_ntp.comm.rendezvous import WORLD_SIZE_VARIABLE
from lightning_ntp.errors import ConfigError, LaunchError
from lightning_ntp.supervisor.ends import AllOrNothing, EndPolicy, MemberEnd
from lightning_ntp.supervisor.interfaces import GLOO_VARIABLE
from lightning_ntp.supervisor.node import Node
from lightning_ntp.supervisor.sites import HostedStore, StoreSite

_PR_SET_PDEATHSIG = 1
_TO_GROUP = (signal.SIGINT,)
_TO_MEMBER = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Supervisor:
    """Starts ``num_members`` processes on this machine and sees them through to their end.

    Attributes:
        command: The command line of every member, or a function from the rank to it.
        num_members: How many to start.
        env: Variables that the members get besides this process's own and those of :meth:`member_env`.
        cwd: Working directory of the members; by default this process's.
        seats: Names for the reader, in the order of the ranks here.
        policy: What the end of a member means.
        node: Which members of the job these are; by default all.
        site: Where the job's store is; by default in this process, on a free port of the loopback interface.
        hidden: Variables of this process that the members do not get.
        start_s: How long to wait for a store that is elsewhere, in seconds.
        stop_signal: The first signal that asked the job to stop, if one did.
        ends: Members that have ended, in the order seen.

    Raises:
        ConfigError: if ``num_members`` is below 1, or ``seats`` or ``node`` has another number of members.
    """

    command: Sequence[str] | Callable[[int], Sequence[str]]
    num_members: int
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    seats: Sequence[str] = ()
    policy: EndPolicy = field(default_factory=AllOrNothing)
    node: Node | None = None
    site: StoreSite = field(default_factory=HostedStore)
    hidden: Collection[str] = ()
    start_s: float = 300.0

    def __post_init__(self) -> None:
        if self.num_members < 1:
            raise ConfigError(f"num_members={self.num_members}: a job needs at least 1 member")
        if self.seats and len(self.seats) != self.num_members:
            raise ConfigError(f"seats names {len(self.seats)} seats for num_members={self.num_members}: name each one")
        self.node = self.node or Node.alone(self.num_members)
        if len(self.node.ranks) != self.num_members:
            raise ConfigError(f"num_members={self.num_members}, but this node has the ranks {self.node.ranks}")
        self.stop_signal: signal.Signals | None = None
        self.ends: list[MemberEnd] = []
        self._running: dict[int, subprocess.Popen] = {}
        self._killed: set[int] = set()
        self._kill_at: float | None = None
        self._interrupted = False

    def run(self) -> int:
        """Start the members and wait until all have ended. To be called once, from the main thread.

        Returns:
            What the policy makes of the members' ends.

        Raises:
            LaunchError: outside the main thread, or if the store cannot be had or a member cannot be started.
        """
        if threading.current_thread() is not threading.main_thread():
            raise LaunchError("the members of a job must be started from the main thread: call fit there")
        start, exit_code = time.monotonic(), None
        self.site.open(self.start_s)  # may take long: signals still end this process at once
        with _SignalInbox((*_TO_GROUP, *_TO_MEMBER)) as inbox:
            try:
                self._see_through(inbox)
                exit_code, note = self.policy.exit_code(self), self.policy.note(self)
            finally:
                self._kill_and_wait()
                self.policy.on_finish(self, exit_code)
        if (exit_code != 0 or note) and not (self.node.is_shim and self.stop_signal):
            print(self._summary(exit_code, time.monotonic() - start, note), file=sys.stderr, flush=True)
        return exit_code

    def _see_through(self, inbox: _SignalInbox) -> None:
        self.policy.on_start(self)
        for rank in self.node.ranks:
            self._spawn(rank)
        while self._running or self.policy.waits(self):
            for signum in inbox.wait(self._time_to_wake()):
                self._forward(signum)
            self._reap()
            self.policy.on_poll(self)
            if self._time_to_kill() == 0:
                self.kill()

    def member_env(self, rank: int) -> dict[str, str]:
        """The complete environment of a member: torch's names, the store's address, and one share of the CPUs.

        gloo is told to use the interface that leads to the store, unless the user chooses one.
        """
        threads, interface = max(1, len(os.sched_getaffinity(0)) // self.node.local_world_size), self.site.interface()
        return {
            "OMP_NUM_THREADS": str(threads),
            **({GLOO_VARIABLE: interface} if interface else {}),
            **{name: value for name, value in os.environ.items() if name not in self.hidden},
            **self.env,
            **self.policy.member_env(rank),
            **self.node.member_env(rank),
            **self.site.member_env(),
            WORLD_SIZE_VARIABLE: str(self.node.world_size),
        }

    @property
    def running(self) -> Collection[int]:
        """Ranks whose processes run."""
        return self._running.keys()

    def kill_after(self, delay_s: float) -> None:
        """Kill the members that still run in ``delay_s`` seconds, unless an earlier time was set before."""
        at = time.monotonic() + delay_s
        self._kill_at = at if self._kill_at is None else min(self._kill_at, at)

    def start_member(self, rank: int) -> None:
        """Start the process of a rank whose earlier one has ended.

        Raises:
            LaunchError: if it cannot be started.
        """
        assert rank not in self._running, f"rank {rank} still runs"
        self._killed.discard(rank)
        self._spawn(rank)

    def kill_member(self, rank: int) -> bool:
        """Kill one member's process group, now; returns whether it still runs. Its end is then seen like any other."""
        process = self._running.get(rank)
        if process is None:
            return False
        self._killed.add(rank)
        _signal_group(process, signal.SIGKILL)
        return True

    def kill(self) -> None:
        """Kill the process groups of all members that still run, now."""
        self._kill_at = None
        for rank, process in self._running.items():
            self._killed.add(rank)
            _signal_group(process, signal.SIGKILL)

    def _spawn(self, rank: int) -> None:
        command = list(self.command(rank) if callable(self.command) else self.command)
        try:
            self._running[rank] = subprocess.Popen(
                command,
                env=self.member_env(rank),
                cwd=self.cwd,
                start_new_session=True,
                preexec_fn=_die_with_parent(os.getpid()),
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise LaunchError(f"rank {rank} could not be started with the command {command}: {error}") from error

    def _reap(self) -> None:
        for rank, process in list(self._running.items()):
            # Looked at, not reaped: until wait() the number belongs to the dead leader, so killpg hits its group only.
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            _signal_group(process, signal.SIGKILL)
            code = process.wait()
            del self._running[rank]
            seat = self.seats[self.node.ranks.index(rank)] if self.seats else ""
            end = MemberEnd(rank, seat, code if code >= 0 else 128 - code, killed=rank in self._killed and code < 0)
            self.ends.append(end)
            self.policy.on_end(self, end)

    def _forward(self, signum: signal.Signals) -> None:
        if signum == signal.SIGINT and self._interrupted:
            self.kill()
            return
        self._interrupted |= signum == signal.SIGINT
        if signum in _STOPPING and self.stop_signal is None:
            self.stop_signal = signum
        for process in self._running.values():
            if signum in _TO_GROUP:
                _signal_group(process, signum)
            else:
                process.send_signal(signum)

    def _time_to_kill(self) -> float | None:
        return None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())

    def _time_to_wake(self) -> float | None:
        times = [at for at in (self._time_to_kill(), self.policy.poll_s) if at is not None]
        return min(times, default=None)

    def _kill_and_wait(self) -> None:
        self.kill()
        for process in self._running.values():
            process.wait()

    def _summary(self, exit_code: int, elapsed_s: float, note: str) -> str:
        title = f"lightning_ntp: {self.node.title}"
        if exit_code == 0:
            return f"{title} finished after {elapsed_s:.1f} s; {note}"
        failures = [end for end in self.ends if end.exit_code != 0]
        what = f"was stopped by {self.stop_signal.name}" if self.stop_signal else "failed"
        text = f"{title} {what} after {elapsed_s:.1f} s, exit code {exit_code}: "
        text += note or "; then ".join(map(str, failures))
        if not self.stop_signal and any(end.exit_code == 128 + signal.SIGKILL and not end.killed for end in failures):
            text += ". A SIGKILL from nowhere is often the kernel short of memory: see dmesg"
        return text


class _SignalInbox:
    """While open, signals are numbers in a pipe instead of interruptions. SIGCHLD ends a wait but is not handed out."""

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        ignored = [signum for signum in signals if signal.getsignal(signum) == signal.SIG_IGN]
        self._signals = [signum for signum in signals if signum not in ignored]

    def __enter__(self) -> _SignalInbox:
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._old = {signum: signal.signal(signum, _nothing) for signum in (*self._signals, signal.SIGCHLD)}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._read_fd)
        os.close(self._write_fd)

    def wait(self, timeout_s: float | None) -> list[signal.Signals]:
        """Signals that came in, at the latest after ``timeout_s`` seconds (None: as long as it takes)."""
        if not select.select([self._read_fd], [], [], timeout_s)[0]:
            return []
        numbers = os.read(self._read_fd, 4096)
        return [signal.Signals(number) for number in numbers if number in self._signals]


def _nothing(_signum: int, _frame: FrameType | None) -> None:
    """A handler must exist for the pipe to be written."""


def _die_with_parent(parent_pid: int) -> Callable[[], None]:
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up here: little is safe between fork and exec

    def between_fork_and_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # it died before the line above
            os.kill(os.getpid(), signal.SIGKILL)

    return between_fork_and_exec


def _signal_group(process: subprocess.Popen, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signum)
