"""Ends a supervisor that is stuck in a call to a store elsewhere: such a call cannot be trusted to time out."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from lightning_ntp.membership.exits import ExitCode

_TICK_S = 0.25


class StoreGuard:
    """A thread that ends the process when :meth:`tick` has not been called for too long.

    It counts its own ticks instead of reading a clock: a process that was stopped has not been stuck.

    Args:
        limit_s: Gives the longest time between two calls, in seconds.
        kill: Kills the members.
        address: Of the store, for the reader.
    """

    def __init__(self, limit_s: Callable[[], float], kill: Callable[[], None], address: str) -> None:
        self._limit_s, self._kill, self._address = limit_s, kill, address
        self._ticks = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ntp-store-guard", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """From now on the process may take its time."""
        self._stopped.set()

    def tick(self) -> None:
        """The main thread is not stuck."""
        self._ticks = 0

    def _watch(self) -> None:
        while not self._stopped.wait(_TICK_S):
            self._ticks += 1
            if self._ticks * _TICK_S > self._limit_s():
                self._kill()
                text = f"the job's store at {self._address} does not answer, and with it the job is lost"
                print(f"lightning_ntp: {text}", file=sys.stderr, flush=True)
                os._exit(int(ExitCode.STORE_LOST))
