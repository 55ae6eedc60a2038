"""B10: machines as network namespaces. One is lost, one is cut off, one is drained and another takes its place."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_ntp.membership.exits import ExitCode
from tests.dist.light_trainer import GLOBAL_BATCH, TIMEOUTS
from tests.support import processes
from tests.support.launched import LIGHT, Launched, launched, until
from tests.support.light import REPOSITORY
from tests.support.namespaces import Machine, Network, network

TRAINER = str(REPOSITORY / "tests/dist/light_trainer.py")
PORT, LIMIT_S = 29500, 120.0
ON_A, ON_B = ["r0.s0.0", "r0.s1.0"], ["r1.s0.0", "r1.s1.0"]
A_SEATS, ALL_SEATS = ["r0.s0", "r0.s1"], ["r0.s0", "r0.s1", "r1.s0", "r1.s1"]

Line = dict[str, Any]


@dataclass
class Cluster:
    """A job on machines a and b, a with the store; c is a spare."""

    net: Network
    job: Launched

    @property
    def store(self) -> str:
        return f"{self.net.machines['a'].address}:{PORT}"

    def start(self) -> list:
        """Both launchers, and a first step of all members."""
        launchers = [self.launch(self.net.machines[name], index) for index, name in enumerate("ab")]
        self.see(ON_A + ON_B, lambda line: line["event"] == "step")
        return launchers

    def launch(self, machine: Machine, index: int):
        options = ("--nnodes", "2", "--node-rank", str(index), "--nproc-per-node", "2")
        return machine.start(self.job, LIGHT, "run", "--store", self.store, *options, *self.script)

    @property
    def script(self) -> tuple[str, ...]:
        return TRAINER, str(self.job.directory), "2,2"

    def lines(self, member: str) -> list[Line]:
        path = Path(self.job.directory, member)
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def find(self, member: str, condition) -> list[Line]:
        return [line for line in self.lines(member) if condition(line)]

    def see(self, members: list[str], condition) -> None:
        """Wait until each of these members has written such a line."""
        text = f"waited in vain for {members}"
        until(lambda: all(self.find(member, condition) for member in members), text, LIMIT_S)

    def steps_in(self, members: list[str], seats: list[str]) -> None:
        """Wait until each has taken a step in a view of exactly these seats."""

        def is_there(member: str) -> bool:
            views = self.find(member, lambda line: line["event"] == "view")
            steps = self.find(member, lambda line: line["event"] == "step")
            last = views[-1] if views else None
            is_view = last and sorted(last["members"]) == seats  # joiners come one after the other, in any order
            return bool(is_view and steps and steps[-1]["generation"] == last["generation"])

        until(lambda: all(map(is_there, members)), f"{members} take no step in a view of {seats}", LIMIT_S)

    def samples_are_right(self, members: list[str], partly: int = -1) -> None:
        """No sample is lost or seen twice: the parts of all replicas are the global batch, at every step.

        Args:
            members: Who wrote of them.
            partly: A step of which those that were lost may not have written any more, though it is committed.
        """
        parts: dict[int, dict[tuple, None]] = {}
        for member in members:
            for line in self.find(member, lambda line: line["event"] == "step"):
                parts.setdefault(line["step"], {})[tuple(line["ids"])] = None
        for step, by_part in parts.items():
            ids = sorted(sample for part in by_part for sample in part)
            whole = list(range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH))
            assert ids == whole or (step == partly and ids == whole[: len(ids)]), (step, by_part)
        assert sorted(parts) == list(range(len(parts)))

    def new_views(self) -> list[Line]:
        """What a's members agreed on once b's were gone, one line for each of them."""
        seen = [self.find(member, lambda line: line["event"] == "view" and line["generation"] > 0) for member in ON_A]
        assert [[view["members"] for view in views] for views in seen] == [[A_SEATS]] * 2
        return [views[0] for views in seen]

    def ends_well(self, launcher) -> str:
        code, text = self.job.end(launcher)
        assert code == 0, text
        return text


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    with network("a", "b", "c") as net, launched(tmp_path) as job:
        yield Cluster(net, job)


def test_a_whole_machine_is_killed(cluster):
    on_a, _ = cluster.start()
    before = time.monotonic()
    killed = cluster.net.machines["b"].kill()
    assert len(killed) >= 3 and not any(processes.is_running(pid) for pid in killed)
    cluster.steps_in(ON_A, A_SEATS)
    assert time.monotonic() - before >= TIMEOUTS.lease_s  # nobody could tell of the deaths
    cluster.job.let_finish()
    text = cluster.ends_well(on_a)
    assert all(f"{seat} counts as dead: it gave no sign of life" in text for seat in ("r1.s0", "r1.s1"))
    cluster.samples_are_right(ON_A + ON_B, partly=cluster.new_views()[0]["step"])


def test_a_cut_link_splits_no_brain(cluster):
    on_a, on_b = cluster.start()
    cluster.net.cut(cluster.net.machines["b"])
    cut = time.monotonic()
    cluster.see(ON_B, lambda line: line["event"] == "ended")
    cluster.steps_in(ON_A, A_SEATS)
    for member in ON_B:
        ended = cluster.lines(member)[-1]
        assert ended["event"] == "ended" and ended["code"] == ExitCode.LEASE_EXPIRED
        assert ended["t"] - cut <= TIMEOUTS.lease_s + 1.0  # the last sign of life was before; it looks now and then
    views = cluster.new_views()
    began, committed = min(view["t"] for view in views), views[0]["step"]
    assert began - cut >= TIMEOUTS.lease_s - TIMEOUTS.beat_s
    for member in ON_B:
        steps = cluster.find(member, lambda line: line["event"] == "step")
        assert cluster.lines(member)[-1]["t"] < began and steps[-1]["step"] <= committed
        assert {view["generation"] for view in cluster.find(member, lambda line: line["event"] == "view")} == {0}
    code, text = cluster.job.end(on_b)
    assert code == ExitCode.STORE_LOST and f"the job's store at {cluster.store} does not answer" in text
    cluster.job.let_finish()
    cluster.ends_well(on_a)
    cluster.samples_are_right(ON_A + ON_B, partly=committed)


def test_one_is_drained_and_another_takes_its_place(cluster):
    on_a, on_b = cluster.start()
    a, c = cluster.net.machines["a"], cluster.net.machines["c"]
    drain = a.start(cluster.job, LIGHT, "cli", "drain", "b", "--store", cluster.store)
    assert cluster.ends_well(drain) == "" and drain.returncode == 0
    text = cluster.ends_well(on_b)
    assert "handed over and left: r1.s0, r1.s1; no member is left here, but the job goes on elsewhere" in text
    cluster.steps_in(ON_A, A_SEATS)
    joined = c.start(cluster.job, LIGHT, "run", "--store", cluster.store, "--join", "r1.s0,r1.s1", *cluster.script)
    on_c = ["r1.s0.1", "r1.s1.1"]
    cluster.steps_in(ON_A + on_c, ALL_SEATS)
    cluster.job.let_finish()
    assert [cluster.ends_well(launcher) for launcher in (joined, on_a)]
    assert not cluster.find(ON_A[0], lambda line: line["event"] == "failure" and line["cause"] != "planned")
    cluster.samples_are_right(ON_A + ON_B + on_c)
    done = [cluster.lines(member)[-1] for member in ON_A + on_c]
    assert {(line["event"], line["degree"]) for line in done} == {("done", 2)}
    by_slot = [{line["slot"]: line["digest"] for line in lines} for lines in (done[:2], done[2:])]
    assert by_slot[0] == by_slot[1] and sorted(by_slot[0]) == [0, 1]
