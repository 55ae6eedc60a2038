"""Starts launchers as processes, and sees what their members (``tests/dist/launched_member.py``) write."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning_ntp.comm.rendezvous import connect_store
from lightning_ntp.membership.store import JobStore
from tests.support import processes
from tests.support.light import REPOSITORY

MEMBER = str(REPOSITORY / "tests/dist/launched_member.py")
LIGHT = str(REPOSITORY / "tests/dist/light.py")
TOKEN = "a secret of this test"
LIMIT_S = 60.0


class Launched:
    """Launchers of one job and the files of its members.

    Args:
        directory: Where the members write.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started: list[subprocess.Popen] = []
        launcher = ("SLURM_", "NTP_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
        session = {name: value for name, value in os.environ.items() if name == "NTP_TEST_SESSION"}
        self.env = {
            **kept,
            **session,
            "RES_OPTIONS": "attempts:0",  # a store's client looks up its own name
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "NTP_TOKEN": TOKEN,
        }

    def run(self, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen:
        """Start a launcher with these words of its command line."""
        return self.start(LIGHT, "run", *words, env=env)

    def start(self, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, *words], env={**self.env, **(env or {})}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def member(self, degrees: str, *orders: str) -> tuple[str, ...]:
        """The words that name the members' script."""
        return (MEMBER, str(self.directory), degrees, *orders)

    def end(self, process: subprocess.Popen) -> tuple[int, str]:
        """Wait for a launcher; returns its exit code and what it wrote to stderr."""
        _, err = process.communicate(timeout=LIMIT_S)
        return process.returncode, err

    def facts(self, name: str) -> dict[str, Any]:
        """What a member has written, such as ``r0.s0.0.in``, as soon as it has."""
        until(lambda: (self.directory / name).exists(), f"{name} is not written")
        return json.loads((self.directory / name).read_text())

    def is_in(self, *members: str, seats: set[str] | None = None) -> None:
        """Wait until all these members (``r0.s0.0``) are in one view, of these seats."""
        wanted = seats or {member.rpartition(".")[0] for member in members}

        def all_are() -> bool:
            paths = [self.directory / f"{member}.in" for member in members]
            if not all(path.exists() for path in paths):
                return False
            views = [json.loads(path.read_text()) for path in paths]
            return all(view == views[0] and set(view["members"]) == wanted for view in views)

        until(all_are, f"{members} are not in one view of {wanted}")

    def kill(self, member: str, signum: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.facts(member)["pid"], signum)

    def let_finish(self) -> None:
        (self.directory / "go").touch()

    def store(self, address: str) -> JobStore:
        """The store of the job, for this process."""
        return JobStore(lambda: connect_store({"NTP_STORE": address}, 10.0), TOKEN)

    def close(self) -> None:
        """End what is left of the launchers; their members end with them."""
        for process in self.started:
            for pid in [*processes.descendants(process.pid), process.pid] if process.poll() is None else []:
                processes.kill(pid)
            with contextlib.suppress(ValueError):  # closed already
                process.communicate()


def until(condition: Callable[[], bool], text: str, limit_s: float = LIMIT_S) -> None:
    """Wait for it, but not for ever."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, text
        time.sleep(0.01)


def free_address(host: str = "127.0.0.1") -> str:
    with socket.socket() as listener:
        listener.bind((host, 0))
        return f"{host}:{listener.getsockname()[1]}"


@contextlib.contextmanager
def launched(directory: Path) -> Iterator[Launched]:
    job = Launched(directory)
    try:
        yield job
    finally:
        job.close()
