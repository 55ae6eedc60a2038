"""Runs a function in the members of a job, as a script that each of them runs; forked, so that a job costs seconds."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning_ntp.config import Timeouts
from lightning_ntp.membership.exits import exit_code_of
from lightning_ntp.membership.latest import latest_generation
from lightning_ntp.membership.store import JobStore
from lightning_ntp.membership.view import View
from lightning_ntp.strategies import process
from lightning_ntp.topology import Seat, Topology
from tests.support.job import TIMEOUTS, TOKEN, End, Job, connect, process_name
from tests.support.zygote_worker import environment

Script = Callable[..., Any]


@dataclass(frozen=True)
class Play:
    """One job.

    Attributes:
        script: What each member runs.
        degrees: Of the replicas; the script's first argument.
        faults: Text of the fault plan.
        arguments: More arguments of the script.
        timeouts: All time limits.
        limit_s: After so long the job counts as hung.
        signal: Sent to all members, as a launcher passes its own on, once all of ``r0.s0.0.step`` and the like exist.
    """

    script: Script
    degrees: tuple[int, ...] = (2, 2)
    faults: str = ""
    arguments: tuple[Any, ...] = ()
    timeouts: Timeouts = TIMEOUTS
    limit_s: float = 90.0
    signal: signal.Signals | None = None


@dataclass
class Played:
    """What became of it.

    Attributes:
        ends: Of its processes, in order.
        results: What the script returned, by the name of the process.
        texts: What each process wrote.
        fatal: What ended the job for all members, if something did.
        generation: The newest.
        num_keys: Of the store at the end.
    """

    ends: list[End]
    results: dict[str, Any]
    texts: dict[str, str]
    fatal: str
    generation: int
    num_keys: int

    @property
    def codes(self) -> dict[str, int]:
        """Exit code of each process."""
        return {end.name: end.code for end in self.ends}

    @property
    def story(self) -> str:
        """For a test that fails."""
        parts = [f"-- {name}\n{_shortened(text)}" for name, text in self.texts.items() if self.codes.get(name) != 0]
        return f"{self.codes}\n" + "\n".join(parts)

    def survivors(self, *dead: str) -> dict[str, Any]:
        """Results of all processes, after a look at their ends.

        Args:
            dead: Those that must have been killed; all others must have ended well.
        """
        __tracebackhide__ = True
        assert {name for name, code in self.codes.items() if code == -signal.SIGKILL} == set(dead), self.story
        assert {code for name, code in self.codes.items() if name not in dead} == {0}, self.story
        return self.results


def _shortened(text: str) -> str:
    """Without progress bars."""
    return "\n".join(line for line in text.splitlines() if line.strip() and "it/s" not in line)[-6000:]


def play(rank: int, world_size: int, store_address: str, job: Play) -> Played:
    """Run a job. To be called in the zygote's rank, whose working directory all members share."""
    port = int(store_address.rsplit(":", 1)[1])
    founding = View.founding(Topology.start(job.degrees))
    running = Job(port, founding, partial(_be_member, port, job), job.limit_s, job.timeouts)
    if job.signal is not None:
        waiting = [Path(f"{seat}.0.step") for seat in founding.members]
        threading.Thread(target=_send, args=(job.signal, waiting, dict(running._running)), daemon=True).start()
    ends = running.run()
    results = {path.stem: pickle.loads(path.read_bytes()) for path in sorted(Path().glob("*.result"))}
    texts = {path.stem: path.read_text(errors="replace") for path in sorted(Path().glob("*.text"))}
    fatal = running.host.facts.fatal
    store = JobStore(lambda: connect(port), TOKEN)
    told = "" if fatal is None else f"{fatal.seat}: {fatal.text}"
    return Played(ends, results, texts, told, latest_generation(store), store.client.num_keys())


def _send(signum: signal.Signals, waiting: list[Path], pids: dict[Seat, int]) -> None:
    while not all(path.exists() for path in waiting):
        time.sleep(0.01)
    for pid in pids.values():
        os.kill(pid, signum)


def _be_member(port: int, job: Play, seat: Seat, incarnation: int) -> int:
    name, topology = process_name(seat, incarnation), Topology.start(job.degrees)
    output = os.open(f"{name}.text", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1, output, all_threads=True)
    os.environ |= environment(topology.members.index(seat), topology.world_size, f"127.0.0.1:{port}")
    os.environ |= {
        "NTP_STORE": f"127.0.0.1:{port}",
        "NTP_TOKEN": TOKEN,
        "NTP_SEAT": str(seat),
        "NTP_INCARNATION": str(incarnation),
        "NTP_FAULTS": job.faults,
    }
    warnings.filterwarnings("ignore")
    return _end_as_python(lambda: _run(job, name))


def _run(job: Play, name: str) -> None:
    result = job.script(job.degrees, *job.arguments)
    Path(f"{name}.part").write_bytes(pickle.dumps(result))
    Path(f"{name}.part").rename(f"{name}.result")


def _end_as_python(script: Callable[[], None]) -> int:
    """Run a script and end as the interpreter does: tell of the error, then the exit functions."""
    code: Any = 0
    try:
        script()
    except SystemExit as request:  # Python keeps no trace of it
        code = request.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException as error:
        sys.last_value, code = error, exit_code_of(error)
        sys.excepthook(type(error), error, error.__traceback__)
    if process.ProcessMember.current is not None:
        with contextlib.suppress(SystemExit):
            process._end(process.ProcessMember.current)
    return code if isinstance(code, int) else int(code is not None)
