"""A job of forked members in one rank of a zygote run; that rank is the launcher. It looks after them by ``Host``."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore

from lightning_ntp.config import Timeouts
from lightning_ntp.membership.host import Host
from lightning_ntp.membership.store import JobStore
from lightning_ntp.membership.view import View
from lightning_ntp.topology import Seat

TOKEN = "job"
# Deaths are told by the launcher at once; the limits for silence are wide, as a loaded machine is no fault.
TIMEOUTS = Timeouts(
    beat_s=0.1, lease_s=8.0, lease_margin_s=2.0, classify_s=12.0, join_s=20.0, build_s=20.0, hang_s=25.0,
    slow_hang_s=30.0, shutdown_grace_s=2.0, start_s=30.0, collective_s=40.0,
)  # fmt: skip
NEVER_ENDED = -999


def process_name(seat: Seat, incarnation: int) -> str:
    """``r0.s1.0``: the first process at seat r0.s1."""
    return f"{seat}.{incarnation}"


@dataclass(frozen=True)
class End:
    """The end of a process as its parent saw it.

    Attributes:
        name: Of the process.
        code: Exit code; negative for a signal.
        at: On the monotonic clock, which all processes of a machine share.
        by_launcher: Whether the launcher had killed it: it was silent or stuck.
    """

    name: str
    code: int
    at: float
    by_launcher: bool


def connect(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))


def fork(function: Callable[..., int], *arguments: object) -> int:
    """Run a function in a new process; its result is the exit code."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        code = function(*arguments)
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Job:
    """Starts members, tells of their deaths, kills on request, starts them again when a fault plan says so.

    Args:
        port: Of the store.
        founding: The view before the first.
        member: Runs one member, from its seat and incarnation; its result is the exit code.
        limit_s: After so long the job counts as hung.
        timeouts: All time limits.

    Attributes:
        ends: Of all processes that have ended, in that order; of one that never did, with code ``NEVER_ENDED``.
    """

    def __init__(
        self,
        port: int,
        founding: View,
        member: Callable[[Seat, int], int],
        limit_s: float = 60.0,
        timeouts: Timeouts = TIMEOUTS,
    ) -> None:
        self.ends: list[End] = []
        self._member, self._limit_s = member, limit_s
        self._incarnations = dict.fromkeys(founding.members, 0)
        self._killed: set[int] = set()
        self._failed_at, self._grace_s = 0.0, timeouts.shutdown_grace_s
        self._running = {seat: fork(member, seat, 0) for seat in founding.members}
        store = JobStore(lambda: connect(port), TOKEN)
        store.greet()
        self.host = Host(store, founding.members, timeouts, self._kill)

    def run(self) -> list[End]:
        """Wait for the end of all; returns ``ends``."""
        until = time.monotonic() + self._limit_s
        while self._running and time.monotonic() < until:
            self._end_failed()
            for seat, pid in list(self._running.items()):
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    self._ended(seat, pid)
            self.host.poll()
            for seat in self.host.take_returns():
                self._start_again(seat)
            time.sleep(0.002)
        self._give_up()
        return self.ends

    def _end_failed(self) -> None:
        """Once a member has ended the job, the others have a while to end by themselves."""
        if self.host.facts.fatal is None:
            return
        self._failed_at = self._failed_at or time.monotonic()
        if time.monotonic() - self._failed_at > self._grace_s:
            for seat in self._running:
                self._kill(seat)

    def _give_up(self) -> None:
        for pid in self._running.values():
            os.killpg(pid, signal.SIGUSR1)  # the stacks of all, before the end of one changes those of others
        time.sleep(0.5 if self._running else 0.0)
        for seat, pid in self._running.items():
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._note(seat, NEVER_ENDED, False)

    def _note(self, seat: Seat, code: int, by_launcher: bool) -> None:
        self.ends.append(End(process_name(seat, self._incarnations[seat]), code, time.monotonic(), by_launcher))

    def _ended(self, seat: Seat, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        del self._running[seat]
        self._note(seat, code, pid in self._killed)
        self.host.ended(seat, f"exit code {code}")

    def _start_again(self, seat: Seat) -> None:
        if seat in self._running:
            return
        self._incarnations[seat] += 1
        self.host.started(seat, self._incarnations[seat])
        self._running[seat] = fork(self._member, seat, self._incarnations[seat])

    def _kill(self, seat: Seat) -> bool:
        if seat in self._running and self._running[seat] not in self._killed:
            self._killed.add(self._running[seat])
            os.killpg(self._running[seat], signal.SIGUSR1)  # its stacks first: whoever is killed here was stuck
            time.sleep(0.2)
            os.killpg(self._running[seat], signal.SIGKILL)
        return True
