"""The zygote: a process with one thread and the imports done, which forks the ranks of one run after another.

It is its own program (``python -m tests.support.zygote_server FD PRELOAD``), so that it inherits nothing of the test
process but the socket FD. When that socket closes, because the test process closed it or was killed, it kills the
current run and ends. As subreaper it inherits every process whose parent ended, and kills what a run leaves behind.
"""

from __future__ import annotations

import gc
import importlib
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from tests.support import processes
from tests.support.zygote_messages import ERROR, RESULT, Cancel, RankEnd, Ready, Request, RunEnd, Started, parse_frame

_STACK_DUMP_S = 0.3  # how long a stopped rank has to write its stacks before it is killed
_LEFTOVER_S = 1.0  # how long children of a rank that returned have to end by themselves


def serve(connection: Connection, preload: list[str]) -> None:
    """Import ``preload``, then serve requests until the other end of ``connection`` closes."""
    problem = _prepare(preload)
    connection.send(Ready(problem))
    while not problem:
        try:
            request = connection.recv()
        except EOFError:
            return
        if isinstance(request, Request):  # a Cancel that crossed with the end of its run is of no use any more
            run = _Run(request, connection)
            try:
                end = run.watch()
            finally:
                run.sweep()
            connection.send(end)


def _prepare(preload: list[str]) -> str:
    try:
        for module in preload:
            importlib.import_module(module)
        import torch

        torch.set_num_threads(1)
    except BaseException:
        return traceback.format_exc()
    if len(os.listdir("/proc/self/task")) > 1:
        return f"importing {preload} started a thread: a fork would copy locks that nobody releases"
    processes.adopt_orphans()
    # Objects made so far are never collected, so a collection in a rank does not touch (and copy) their pages.
    gc.collect()
    gc.freeze()
    return ""


class _Rank:
    """One forked rank: its process, its pipe, and what is known of its end."""

    def __init__(self, rank: int, pid: int, pipe: int) -> None:
        self.rank = rank
        self.pid = pid
        self.pipe = pipe
        self.pidfd = os.pidfd_open(pid)
        self.received = bytearray()
        self.flag, self.payload = b"", b""
        self.exit_code: int | None = None
        self.order = -1
        self.was_stopped = False

    def read(self) -> bool:
        """Take what the pipe holds; False when there is no more now."""
        try:
            chunk = os.read(self.pipe, 1 << 20)
        except BlockingIOError:
            return False
        self.received += chunk
        if not self.flag:
            self.flag, self.payload = parse_frame(self.received)
        return bool(chunk)

    def end(self) -> RankEnd:
        assert self.exit_code is not None, "a run ends after its ranks"
        return RankEnd(self.rank, self.order, self.exit_code, self.was_stopped, self.flag, self.payload)


class _Run:
    """Fork the ranks of a request and watch them to their end."""

    def __init__(self, request: Request, connection: Connection) -> None:
        self.request = request
        self.connection = connection
        self.ranks: list[_Rank] = []
        self.timed_out = False
        self.num_ended = 0
        self.has_failed = False
        # The ranks write their stacks at the limit themselves; half a second later it is over.
        self.deadline = time.monotonic() + request.timeout_s + 0.5
        self.selector = selectors.DefaultSelector()
        store_address = self._fork_store()
        for rank in range(request.num_ranks):
            self._fork_rank(rank, store_address)
        self.selector.register(connection, selectors.EVENT_READ, self._on_message)
        connection.send(Started(store_address, tuple(rank.pid for rank in self.ranks)))

    def watch(self) -> RunEnd:
        """Return when every rank has ended, by itself or by force."""
        while any(rank.exit_code is None for rank in self.ranks):
            events = self.selector.select(max(0.0, self.deadline - time.monotonic()))
            for key, _ in events:
                key.data()
            if not events and time.monotonic() >= self.deadline:
                self.timed_out |= not self.has_failed
                self._stop()
        for rank in self.ranks:  # a rank may have filled its pipe and ended between two looks
            while rank.read():
                pass
        leftovers = self._leftovers()
        return RunEnd(tuple(rank.end() for rank in self.ranks), self.timed_out, leftovers)

    def sweep(self) -> None:
        """Kill and reap everything that descends from this run, the store's host included, and close its files."""
        while remaining := processes.children(os.getpid()):
            for pid in remaining:
                processes.kill(pid)
                os.waitpid(pid, 0)
        self.selector.close()
        for rank in self.ranks:
            os.close(rank.pipe)
            os.close(rank.pidfd)

    def _fork_store(self) -> str:
        from tests.support.zygote_worker import host_store

        read_end, write_end = os.pipe()
        self.store_pid = _fork(lambda: host_store(write_end), close=[read_end, self.connection.fileno()])
        os.close(write_end)
        port = os.read(read_end, 16).decode()
        os.close(read_end)
        if not port:
            raise RuntimeError("the host of the TCPStore ended before it had a port")
        return f"127.0.0.1:{port}"

    def _fork_rank(self, rank: int, store_address: str) -> None:
        from tests.support.zygote_worker import be_rank

        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        ours = [read_end, self.connection.fileno(), self.selector.fileno()]  # type: ignore[attr-defined]
        ours += [file for other in self.ranks for file in (other.pipe, other.pidfd)]
        pid = _fork(lambda: be_rank(self.request, rank, store_address, write_end), close=ours)
        os.close(write_end)
        process = _Rank(rank, pid, read_end)
        self.ranks.append(process)
        self.selector.register(process.pipe, selectors.EVENT_READ, lambda: self._on_data(process))
        self.selector.register(process.pidfd, selectors.EVENT_READ, lambda: self._on_exit(process))

    def _on_data(self, rank: _Rank) -> None:
        if not rank.read():
            self.selector.unregister(rank.pipe)
        if rank.flag == ERROR:
            self._note_end(rank, failed=True)

    def _on_exit(self, rank: _Rank) -> None:
        self.selector.unregister(rank.pidfd)
        _, status = os.waitpid(rank.pid, 0)
        rank.exit_code = os.waitstatus_to_exitcode(status)
        while rank.read():
            pass
        expected = self.request.expect_exit.get(rank.rank)
        as_expected = rank.exit_code == expected if expected is not None else rank.flag == RESULT
        self._note_end(rank, failed=not as_expected)

    def _note_end(self, rank: _Rank, failed: bool) -> None:
        if rank.order < 0:
            rank.order = self.num_ended
            self.num_ended += 1
        if failed and not self.has_failed:
            self.has_failed = True
            self.deadline = min(self.deadline, time.monotonic() + self.request.grace_s)

    def _on_message(self) -> None:
        try:
            message = self.connection.recv()
        except EOFError:
            self.selector.unregister(self.connection)
            message = Cancel()
        if isinstance(message, Cancel):
            self._stop(dump_s=0.0)

    def _stop(self, dump_s: float = _STACK_DUMP_S) -> None:
        self.has_failed = True
        alive = [rank for rank in self.ranks if rank.exit_code is None]
        for rank in alive:
            rank.was_stopped = True
            if dump_s and not self.timed_out and _catches(rank.pid, signal.SIGUSR1):
                os.kill(rank.pid, signal.SIGUSR1)
        time.sleep(dump_s)
        for rank in alive:
            processes.kill(rank.pid)
        self.deadline = time.monotonic() + 30.0  # only waiting for the kernel now

    def _leftovers(self) -> tuple[str, ...]:
        if self.has_failed or self.request.expect_exit or self.request.allow_leftovers:
            return ()  # a rank that did not leave in order could not clean up either
        until = time.monotonic() + _LEFTOVER_S
        while (left := self._running_children()) and time.monotonic() < until:
            time.sleep(0.02)
        return tuple(f"{processes.command_line(pid)} (pid {pid})" for pid in left)

    def _running_children(self) -> list[int]:
        return [pid for pid in processes.children(os.getpid()) if pid != self.store_pid and processes.is_running(pid)]


def _fork(child: Callable[[], object], close: list[int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        for file in close:
            os.close(file)
        child()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(70)


def _catches(pid: int, number: int) -> bool:
    """Whether ``pid`` has a handler for the signal; without one it would end with nothing written."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


if __name__ == "__main__":
    # Through the import, so that messages are of the classes that the other side knows, not of ``__main__``.
    from tests.support import zygote_server

    zygote_server.serve(Connection(int(sys.argv[1])), sys.argv[2].split(","))
