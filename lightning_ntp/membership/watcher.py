"""The watcher: a thread that reads the event log as it grows, while the main thread computes or is stuck.

It blocks in the store on a connection of its own, so news takes a fraction of a millisecond. There is one watcher for
the whole life of a process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from lightning_ntp.membership.events import Facts
from lightning_ntp.membership.store import JobStore

log = logging.getLogger(__name__)

_END_S = 1.0
_WAIT_S = 86_400.0  # nothing depends on it: a store that is gone raises at once, one that is stuck ends the lease


class Watcher:
    """Keeps :class:`Facts` up to date.

    Args:
        store: Its own clone.
        start: Position in the log from which to read.
        react: Called after every event, in the watcher's thread, with ``lock`` held.
        store_lost: Called when the store's host is gone.

    Attributes:
        facts: What all events so far amount to. Read it with ``lock`` held.
        lock: Guards ``facts``, and whatever ``react`` needs.
        news: Notified after every event.
    """

    def __init__(
        self, store: JobStore, start: int, react: Callable[[Facts], None], store_lost: Callable[[], None]
    ) -> None:
        self.facts = Facts(read=start)
        self.lock = threading.RLock()
        self.news = threading.Condition(self.lock)
        self._store, self._react, self._store_lost = store, react, store_lost
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ntp-watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, wake: Callable[[], object]) -> None:
        """React to nothing more, and end the thread.

        A thread that blocks in the store while the interpreter ends would abort the process when news comes.

        Args:
            wake: Appends an event to the log, which ends the thread's wait.
        """
        self._stopped.set()
        if not self._thread.is_alive() or self._thread is threading.current_thread():
            return
        try:
            wake()
        except RuntimeError as error:
            log.warning("the watcher could not be woken: %s", str(error)[:200])
            return
        self._thread.join(_END_S)

    def wait(self, timeout_s: float) -> None:
        """Until the next event, but no longer than ``timeout_s``."""
        with self.news:
            self.news.wait(timeout_s)

    def catch_up(self, position: int, timeout_s: float) -> bool:
        """Wait until all events before ``position`` are read; returns whether they are."""
        with self.news:
            return self.news.wait_for(lambda: self.facts.read >= position, timeout_s)

    def _watch(self) -> None:
        while not self._stopped.is_set():
            try:
                if not self._store.wait_event(self.facts.read, _WAIT_S):
                    continue
                event = self._store.event(self.facts.read)
            except RuntimeError as error:
                if not self._stopped.is_set():
                    log.error("the job's store is gone: %s", str(error)[:200])
                    self._store_lost()
                return
            with self.news:
                if self._stopped.is_set():
                    return
                self.facts.add(event)
                try:
                    self._react(self.facts)
                except Exception:  # a watcher that ends is a member that hears of nothing more
                    log.exception("the reaction to %s failed", event)
                self.news.notify_all()


def wait_until(condition: Callable[[], bool], timeout_s: float, pause_s: float = 0.005) -> bool:
    """Poll ``condition`` for at most ``timeout_s`` seconds; returns whether it came to hold."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(pause_s)
    return True
