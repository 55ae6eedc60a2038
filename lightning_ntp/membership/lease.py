"""Signs of life, and the lease that ends a member which the others must take for dead.

A blocked call to the store cannot be trusted to time out, and a process may be stopped for seconds and then go on as if
nothing had been. So one thread makes round trips to the store, and another only looks at the clock: when the last
acknowledged round trip was *sent* longer ago than the lease, it ends the process, at once and without clean-up. The
others count from a round trip's arrival, which is later, and wait a margin longer. Hence no two sides ever both go on.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from lightning_ntp.comm.progress import Progress
from lightning_ntp.config import Timeouts
from lightning_ntp.membership.exits import ExitCode
from lightning_ntp.membership.progress import Record
from lightning_ntp.membership.store import JobStore
from lightning_ntp.topology import Seat

log = logging.getLogger(__name__)


def beat_key(seat: Seat, incarnation: int) -> str:
    return f"beat/{seat}/{incarnation}"


def progress_key(seat: Seat, incarnation: int) -> str:
    return f"progress/{seat}/{incarnation}"


class Lease:
    """Keeps one member's lease.

    Args:
        store: Its own clone.
        seat: The member.
        incarnation: Which process at that seat.
        progress: What is told besides the mere life.
        timeouts: ``beat_s`` and ``lease_s``.
        expired: What ends the process; for tests.
    """

    def __init__(
        self,
        store: JobStore,
        seat: Seat,
        incarnation: int,
        progress: Progress,
        timeouts: Timeouts,
        expired: Callable[[], None] | None = None,
    ) -> None:
        self._store, self._progress, self._timeouts = store, progress, timeouts
        self._beat, self._where = beat_key(seat, incarnation), progress_key(seat, incarnation)
        self._expired = expired or end_process
        self._acknowledged = time.monotonic()
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"ntp-lease-{name}", daemon=True)
            for name, target in (("beat", self._keep_beating), ("guard", self._guard))
        ]

    @property
    def age_s(self) -> float:
        """How long ago the last acknowledged sign of life was sent."""
        return time.monotonic() - self._acknowledged

    @property
    def is_valid(self) -> bool:
        return self.age_s <= self._timeouts.lease_s

    def start(self) -> None:
        """Give the first sign of life, then go on in the background."""
        self._give_sign(None)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """For a member that has said that it leaves."""
        self._stopped.set()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(self._timeouts.beat_s + self._timeouts.lease_s / 10)

    def _keep_beating(self) -> None:
        said: Record | None = None
        while not self._stopped.wait(self._timeouts.beat_s):
            if not self.is_valid:  # after a stop this thread may run first: a lease that has expired is not renewed
                return
            try:
                said = self._give_sign(said)
            except RuntimeError as error:  # the guard ends the process in time; until then a store may come back
                log.warning("no sign of life could be given: %s", str(error)[:200])

    def _give_sign(self, said: Record | None) -> Record:
        sent, record = time.monotonic(), Record.of(self._progress)
        if record != said:
            self._store.put(self._where, record.to_json())
        self._store.count(self._beat)  # acknowledged, and so is the line above, as one connection keeps the order
        self._acknowledged = sent
        return record

    def _guard(self) -> None:
        while not self._stopped.wait(self._timeouts.lease_s / 20):
            if not self.is_valid:
                log.error("the lease of %.1f s has expired %.1f s ago: ending", self._timeouts.lease_s, self.age_s)
                self._expired()
                return


def end_process() -> None:
    """Without clean-up: groups, hooks and exit functions could block, and the member counts as dead already."""
    os._exit(ExitCode.LEASE_EXPIRED)
