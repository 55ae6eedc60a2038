"""Chaos on bare processes: 2 replicas of 4 members train a checkable model while members are killed, stopped and stuck.

    python -m tests.dist.chaos_bare --runs 50 --seed 0        # prints one line a run, and a JSON line at the end
    python -m tests.dist.chaos_bare --runs 1 --seed 17        # run 17 alone, as it was among the others

The parent is the launcher: it looks after the members by the product's own :class:`Host`. The store lives in a process
of its own. Members are process groups; some have a child that holds their sockets.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_ntp.comm.rendezvous import host_store
from lightning_ntp.membership.host import Host
from lightning_ntp.membership.store import JobStore
from lightning_ntp.membership.view import View
from lightning_ntp.topology import Seat, Topology
from tests.dist.bare_member import TIMEOUTS, TOKEN, connect, run_member
from tests.dist.chaos_judge import Injury, Trial, judge, summary

NO_DNS = ("RES_OPTIONS", "attempts:0")
"""A store's client looks up its own name when it connects; where the DNS does not answer, that takes 5 s."""

REPLICAS, DEGREE, NUM_STEPS, LIMIT_S = 2, 4, 60, 45.0


@dataclass
class Plan:
    """What will happen in one run; follows from the seed alone, but for who still lives at that moment.

    Attributes:
        injuries: (seconds after the start, kind, victims) in order of time.
        sockets: Seats whose members have a child that holds their sockets.
        return_s: A dead member's seat is taken again after so many seconds; never, if ``None``.
    """

    injuries: list[tuple[float, str, list[Seat]]] = field(default_factory=list)
    sockets: frozenset[Seat] = frozenset()
    return_s: float | None = None


def make_plan(seed: int) -> Plan:
    """1 to 3 injuries, 30 % of the runs with the first during start-up."""
    draw = random.Random(seed)
    seats = Topology.start([DEGREE] * REPLICAS).members
    at = draw.uniform(0.0, 0.25) if draw.random() < 0.3 else draw.uniform(0.3, 1.3)
    injuries = []
    for _ in range(draw.choice([1, 2, 2, 3])):
        kind = draw.choices(["kill", "replica", "stop", "hang", "blink", "raise"], [75, 4, 6, 6, 5, 4])[0]
        seat = seats[0] if draw.random() < 0.2 else draw.choice(seats)
        victims = [s for s in seats if s.replica == seat.replica] if kind == "replica" else [seat]
        injuries.append((at, "kill" if kind == "replica" else kind, victims))
        at += draw.choice([draw.uniform(0, 0.03), draw.uniform(0, 0.1), draw.uniform(0, 0.4)])
    sockets = frozenset(draw.sample(seats, 2)) if draw.random() < 0.3 else frozenset()
    return Plan(injuries, sockets, draw.uniform(0.05, 0.5) if draw.random() < 0.4 else None)


class Launcher:
    """Forks the members, injures them as planned, and tells of their ends."""

    def __init__(self, plan: Plan, port: int, directory: Path) -> None:
        self.plan, self.port, self.directory = plan, port, directory
        self.founding = View.founding(Topology.start([DEGREE] * REPLICAS))
        self.running: dict[Seat, int] = {}
        self.lives: dict[Seat, int] = {}
        self.codes: dict[str, int | str] = {}
        self.injuries: list[Injury] = []
        self._continue: list[tuple[float, int]] = []
        self._returns: list[tuple[float, Seat]] = []

    def run(self) -> None:
        for seat in self.founding.members:
            self._start(seat, self.founding)
        self.started = time.monotonic()
        self.store = JobStore(lambda: connect(self.port), TOKEN)
        self.store.greet()
        self.host = Host(self.store, self.founding.members, TIMEOUTS, self._kill)
        pending = list(self.plan.injuries)
        while self.running and time.monotonic() - self.started < LIMIT_S:
            while pending and time.monotonic() - self.started >= pending[0][0]:
                _, kind, victims = pending.pop(0)
                for seat in victims:
                    self._injure(kind, seat)
            self._resume()
            self._reap()
            self._return()
            self.host.poll()
            time.sleep(0.002)
        for seat, pid in self.running.items():
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self.codes[self._name(seat)] = "hung"

    def _start(self, seat: Seat, founding: View | None) -> None:
        number = self.lives[seat] = self.lives.get(seat, -1) + 1
        self.running[seat] = fork(
            run_member, self.port, seat, founding, number, NUM_STEPS, self.directory / self._name(seat),
            seat in self.plan.sockets,
        )  # fmt: skip

    def _name(self, seat: Seat) -> str:
        """Of the process that sits there: ``r0.s1``, after a return ``r0.s1.1``."""
        return f"{seat}.{self.lives[seat]}" if self.lives[seat] else str(seat)

    def _return(self) -> None:
        for entry in [entry for entry in self._returns if time.monotonic() >= entry[0]]:
            self._returns.remove(entry)
            if len(self.running) >= 2:
                self._start(entry[1], None)
                self.host.started(entry[1], self.lives[entry[1]])

    def _injure(self, kind: str, seat: Seat) -> None:
        if seat not in self.running or len(self.running) <= 2:
            return
        pid = self.running[seat]
        numbers = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "blink": signal.SIGSTOP, "hang": signal.SIGUSR1}
        self.injuries.append(Injury(kind, self._name(seat), time.monotonic()))
        os.kill(pid, numbers.get(kind, signal.SIGUSR2))
        if kind == "blink":  # shorter than the lease: nobody must notice
            self._continue.append((time.monotonic() + TIMEOUTS.lease_s / 3, pid))

    def _resume(self) -> None:
        for entry in [entry for entry in self._continue if time.monotonic() >= entry[0]]:
            self._continue.remove(entry)
            if entry[1] in self.running.values():
                os.kill(entry[1], signal.SIGCONT)

    def _kill(self, seat: Seat) -> bool:
        if seat in self.running:
            self.injuries.append(Injury("by host", self._name(seat), time.monotonic()))
            os.killpg(self.running[seat], signal.SIGKILL)
        return True

    def _reap(self) -> None:
        for seat, pid in list(self.running.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # first its whole group, then the news
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            del self.running[seat]
            self.codes[self._name(seat)] = code
            if code < 0 and self.plan.return_s is not None:
                self._returns.append((time.monotonic() + self.plan.return_s, seat))
            self.host.ended(seat, f"exit code {code}")


def fork(function, *arguments) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = function(*arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


def keep_store(write_fd: int) -> int:
    store = host_store()
    os.write(write_fd, str(store.port).encode())
    os.close(write_fd)
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.5)
    return 0


def run_trial(seed: int, directory: Path | None = None) -> Trial:
    """One run. It can be repeated alone: the plan depends on the seed only."""
    with contextlib.ExitStack() as stack:
        logs = directory or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        logs.mkdir(parents=True, exist_ok=True)
        read_fd, write_fd = os.pipe()
        store_pid = fork(keep_store, write_fd)
        os.close(write_fd)
        port = int(os.read(read_fd, 16))
        os.close(read_fd)
        launcher = Launcher(make_plan(seed), port, logs)
        try:
            launcher.run()
        finally:
            for pid in [*launcher.running.values(), store_pid]:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        return judge(seed, logs, launcher.codes, launcher.injuries, NUM_STEPS)


def run_trials(rank: int, world_size: int, store_address: str, seeds: Sequence[int]) -> list[Trial]:
    """For a zygote: its rank is the launcher."""
    return [run_trial(seed) for seed in seeds]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.dist.chaos_bare")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; run i has seed + i")
    parser.add_argument("--logs", type=Path, help="keep the members' logs here, one folder a run")
    options = parser.parse_args(argv)
    trials = []
    for seed in range(options.seed, options.seed + options.runs):
        trial = run_trial(seed, options.logs and options.logs / str(seed))
        print(trial, flush=True)
        trials.append(trial)
    report = summary(trials)
    print(json.dumps(report))
    return int(any(report[name] for name in ("hangs", "wrong_weights", "views_differ", "false_losses", "wrong_ends")))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault(*NO_DNS)
    import torch

    torch.set_num_threads(1)
    sys.exit(main())
