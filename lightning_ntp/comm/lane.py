"""Where the collectives of the gradient sync run, beside the backward pass.

All members must launch them in one order. On CPU a thread works jobs off first in, first out; on CUDA jobs are launched
at once on a side stream and no Python thread is needed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch


class Lane(Protocol):
    """Runs jobs in the order in which they were submitted."""

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job`` after all earlier ones. What the caller computed before is visible to it."""

    def drain(self) -> None:
        """Return when all jobs are done; raises the first error of any of them."""

    def close(self) -> None: ...


class ThreadLane:
    """One daemon thread, started with the first job. For CPU tensors, and for gloo in general."""

    def __init__(self, name: str = "ntp-sync") -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._idle = threading.Condition()
        self._pending = 0
        self._error: BaseException | None = None

    def submit(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        with self._idle:
            self._pending += 1
        self._jobs.put(_after_current_stream(job))

    def drain(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: self._pending == 0)
            error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame: they would keep each other, and the graph of the pass

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                # After a failure the rest is skipped: peers are gone, each further collective would only wait.
                if self._error is None:
                    with torch.no_grad():
                        job()
            except BaseException as error:
                self._error = error
            with self._idle:
                self._pending -= 1
                self._idle.notify_all()


class StreamLane:
    """A side stream of one CUDA device; jobs are launched by the caller and run in stream order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def submit(self, job: Callable[[], None]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            job()

    def drain(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def close(self) -> None:
        self._stream.synchronize()


def _after_current_stream(job: Callable[[], None]) -> Callable[[], None]:
    """Let a job in another thread see what this thread's CUDA stream has been given to do."""
    if not torch.cuda.is_initialized():
        return job
    device = torch.cuda.current_device()
    event = torch.cuda.current_stream().record_event()

    def run() -> None:
        with torch.cuda.device(device):
            torch.cuda.current_stream().wait_event(event)
            job()
            torch.cuda.current_stream().synchronize()

    return run


def open_lane(device: torch.device, backend: str) -> Lane:
    """The lane for tensors on ``device`` that travel by ``backend``."""
    return StreamLane(device) if device.type == "cuda" and backend == "nccl" else ThreadLane()
