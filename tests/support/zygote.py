"""Run a function in several ranks, each a process of its own, in well under a second.

A *zygote* process imports torch, Lightning and this package once (seconds) and then forks the ranks of every run
(milliseconds). It has one thread and no process group, so a fork copies no locked lock.

    >>> def add_ranks(rank, world_size, store_address):
    ...     with gloo_world(rank, world_size, store_address):
    ...         total = torch.tensor(rank)
    ...         torch.distributed.all_reduce(total)
    ...         return total.item()
    >>> with Zygote() as zygote:
    ...     zygote.run(add_ranks, 4)
    [6, 6, 6, 6]

In a test the fixture ``workers`` is such a zygote. A rank gets one thread, loopback interfaces, the environment of an
externally launched process (``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``NTP_STORE`` ...), a working
directory of its run that is deleted afterwards, and seeds 0. The TCPStore at ``store_address`` lives in none of the
ranks, so any of them may die. Not for ranks that must be started by ``exec``: a launcher's test uses ``subprocess``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Pipe
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support import processes
from tests.support.zygote_failures import WorkerError, ZygoteError, results_of
from tests.support.zygote_messages import Cancel, Ready, Request, RunEnd, Started, pack

PRELOAD = (
    "torch",
    "torch.distributed.tensor",
    "lightning.pytorch",
    "lightning.fabric",
    "torchmetrics",
    "lightning_ntp",
)
_REPOSITORY = Path(__file__).parents[2]
_LAUNCHER_VARIABLES = ("SLURM_", "TORCHELASTIC_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "NTP_STORE")


class Zygote:
    """A context manager around a zygote process; one run at a time.

    Args:
        preload: Modules that the zygote imports before it forks. What a rank imports itself costs every rank its time.

    Raises:
        ZygoteError: at the first run, if an import failed or started a thread.
    """

    def __init__(self, preload: Sequence[str] = PRELOAD) -> None:
        self._preload = tuple(preload)
        self._is_ready = False
        self._is_running = False

    def __enter__(self) -> Zygote:
        self._stderr = tempfile.TemporaryFile()
        self._connection, theirs = Pipe()
        arguments = [str(theirs.fileno()), ",".join(self._preload)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.zygote_server", *arguments],
            cwd=_REPOSITORY,
            env=_base_environment(),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._stderr,
            stderr=self._stderr,
            start_new_session=True,  # Ctrl-C is for the test process, which then cancels the run
        )
        theirs.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(
        self,
        function: Callable[..., Any],
        num_ranks: int,
        *arguments: Any,
        timeout_s: float = 60.0,
        grace_s: float = 2.0,
        env: Mapping[str, str | None] | None = None,
        expect_exit: Mapping[int, int] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        allow_leftovers: bool = False,
    ) -> list[Any]:
        """Call ``function(rank, num_ranks, store_address, *arguments)`` in ``num_ranks`` processes.

        Args:
            function: A function at the top level of a module (or a static method there) that a rank can import.
            arguments: Anything that pickles; tensors travel by value.
            timeout_s: After this many seconds all ranks write their stacks and are killed.
            grace_s: Seconds that the other ranks have to end by themselves after one failed.
            env: Environment variables of the ranks, over the default ones; None removes one.
            expect_exit: Exit codes (negative: a signal) of ranks that must end so; their result is None.
            cwd: Working directory of the ranks; by default one that is deleted after the run.
            allow_leftovers: Whether a rank may return while processes that it started live on; they are killed.

        Returns:
            What the function returned, by rank.

        Raises:
            WorkerError: a rank raised, ended unexpectedly, or left processes behind. Its text has the tracebacks of all
                ranks, the likely cause first, and the ends of their outputs; ``__cause__`` is the first exception.
            WorkerTimeout: (a WorkerError) the time limit; its text has the stacks.
        """
        __tracebackhide__ = True
        run = self.start(
            function, num_ranks, *arguments, timeout_s=timeout_s, grace_s=grace_s, env=env, expect_exit=expect_exit,
            cwd=cwd, allow_leftovers=allow_leftovers,
        )  # fmt: skip
        return run.wait()

    def start(
        self,
        function: Callable[..., Any],
        num_ranks: int,
        *arguments: Any,
        timeout_s: float = 60.0,
        grace_s: float = 2.0,
        env: Mapping[str, str | None] | None = None,
        expect_exit: Mapping[int, int] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        allow_leftovers: bool = False,
    ) -> Run:
        """As ``run``, but return once the ranks are forked; ``Run.wait`` gives the results."""
        if self._is_running:
            raise ZygoteError("this zygote has a run in progress: wait() for it, or use a second Zygote")
        self._await_ready()
        directory = tempfile.TemporaryDirectory(prefix="ranks-")
        request = Request(
            function=_name_of(function),
            arguments=pack(arguments),
            num_ranks=num_ranks,
            timeout_s=timeout_s,
            grace_s=grace_s,
            directory=directory.name,
            cwd=os.path.abspath(cwd if cwd is not None else directory.name),
            sys_path=tuple(os.path.abspath(entry) for entry in sys.path),
            env=dict(env or {}),
            expect_exit=dict(expect_exit or {}),
            allow_leftovers=allow_leftovers,
        )
        self._connection.send(request)
        self._is_running = True
        started = self.receive(Started, timeout_s=30.0)
        return Run(self, request, started, directory)

    def cancel(self) -> None:
        """Kill the ranks of the current run."""
        self._connection.send(Cancel())

    def receive(self, kind: type, timeout_s: float) -> Any:
        """The next message of the zygote, which must be a ``kind``; kills the zygote if nothing comes."""
        try:
            if self._connection.poll(timeout_s):
                message = self._connection.recv()
                self._is_running = not isinstance(message, RunEnd) and self._is_running
                if not isinstance(message, kind):
                    raise ZygoteError(f"the zygote sent {message!r} instead of a {kind.__name__}")
                return message
            problem = f"was silent for {timeout_s:.0f} s"
        except (EOFError, ConnectionError):
            problem = "ended"
        processes.kill(self.pid)  # its ranks end with it: PR_SET_PDEATHSIG
        self._process.wait()
        self._stderr.seek(0)
        output = self._stderr.read().decode(errors="replace")
        raise ZygoteError(f"the zygote {problem}. Its output:\n{output}")

    def _await_ready(self) -> None:
        if self._is_ready:
            return
        ready = self.receive(Ready, timeout_s=300.0)
        if ready.problem:
            raise ZygoteError(f"the zygote could not start: {ready.problem}")
        self._is_ready = True


class Run:
    """Ranks at work.

    Attributes:
        store_address: "127.0.0.1:port" of the TCPStore of this run.
        pids: Process ids by rank.
    """

    def __init__(
        self,
        zygote: Zygote,
        request: Request,
        started: Started,
        directory: tempfile.TemporaryDirectory[str],
    ) -> None:
        self.store_address = started.store_address
        self.pids = started.pids
        self._zygote = zygote
        self._request = request
        self._directory = directory

    def wait(self) -> list[Any]:
        """The results by rank; raises as ``Zygote.run`` says."""
        __tracebackhide__ = True
        limit_s = self._request.timeout_s + self._request.grace_s + 60.0
        with self._directory:
            try:
                end = self._zygote.receive(RunEnd, limit_s)
            except KeyboardInterrupt:
                self._zygote.cancel()
                self._zygote.receive(RunEnd, limit_s)
                raise
            results = results_of(end, self._request)
        if end.leftovers:
            raise WorkerError("ranks returned but left processes behind: " + "; ".join(end.leftovers))
        return results


def _name_of(function: Callable[..., Any]) -> str:
    module, qualname = function.__module__, function.__qualname__
    if module == "__main__" or "<" in qualname:
        raise ZygoteError(
            f"{module}:{qualname} cannot run in a rank, which imports it by name: "
            "move it to the top level of a module that is not the main script"
        )
    return f"{module}:{qualname}"


def _base_environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_VARIABLES)}
    return inherited | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
