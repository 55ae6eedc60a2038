"""Members as processes: chaos, the lease under SIGSTOP, abortable groups, and the supervisor that tolerates deaths."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_ntp.comm.abort import Abort, poison_works
from lightning_ntp.comm.abortable import GenerationWorld
from lightning_ntp.comm.exchange import Exchange
from lightning_ntp.comm.groups import open_channels
from lightning_ntp.comm.progress import Progress
from lightning_ntp.config import Timeouts
from lightning_ntp.errors import GenerationOver
from lightning_ntp.membership.exits import ExitCode
from lightning_ntp.membership.lease import Lease
from lightning_ntp.membership.store import JobStore
from lightning_ntp.membership.watcher import wait_until
from lightning_ntp.supervisor import Supervisor, TolerateDeaths
from lightning_ntp.topology import Seat, Topology
from tests.dist.bare_member import TIMEOUTS, TOKEN
from tests.dist.chaos_bare import NO_DNS, run_trials
from tests.dist.chaos_judge import summary
from tests.support.gloo import connect

REPOSITORY = Path(__file__).parents[2]
ENV = dict([NO_DNS])


# Sockets held by a child, deaths in start-up, two deaths, a stopped member, a return, a user's error.
SEEDS = [(27, 13), *(pytest.param(seeds, marks=pytest.mark.slow) for seeds in [(8, 10), (5, 11)])]


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_chaos(workers, seeds):
    trials = workers.run(run_trials, 1, seeds, timeout_s=100, env=ENV)[0]
    report = summary(trials)
    for trial in trials:
        print(trial)
    assert report["hangs"] == report["wrong_weights"] == report["views_differ"] == report["false_losses"] == 0
    assert not any(trial.problems for trial in trials)


def test_poison_frees_a_blocked_collective():
    assert poison_works()


def _build_while_one_dies(rank, world_size, store_address, when_s):
    """Members build the groups of a generation; the last one dies on the way. Returns how long the others took."""
    store, abort, topology = connect(store_address), Abort(3), Topology.start([2, 2])
    world = GenerationWorld(3, store, abort, timeout=timedelta(seconds=20), build_s=20.0)
    store.add("ready", 1)
    while store.add("ready", 0) < world_size:
        time.sleep(0.001)
    if rank == world_size - 1:
        if when_s == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        world.open(rank, world_size)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    threading.Timer(0.3, lambda: abort.set("the last member died")).start()  # as the watcher would
    with pytest.raises((GenerationOver, RuntimeError)):
        world.open(rank, world_size)
        channels = open_channels(topology, rank, world=world)
        Exchange(channels.control).all_reduce(torch.ones(3))
    took_s = time.monotonic() - started
    abort.set("left")
    world.close()
    return took_s


@pytest.mark.parametrize("when_s", [0, 1], ids=["before", "between"])
def test_a_death_in_the_middle_of_construction_stops_nobody(workers, when_s):
    took = workers.run(_build_while_one_dies, 4, when_s, env=ENV, expect_exit={3: -signal.SIGKILL})
    assert max(took[:3]) < 3.0, took


def _generations(rank, world_size, store_address, rounds):
    """Healthy and broken generations in turn; returns names of groups, and threads and file descriptors at two ends."""
    store, topology, names, used = connect(store_address), Topology.start([2, 2]), [], []
    for generation in range(rounds):
        abort, progress = Abort(generation), Progress()
        world = GenerationWorld(generation, store, abort, timeout=timedelta(seconds=20), build_s=20.0)
        world.open(rank, world_size)
        channels = open_channels(topology, rank, world=world, progress=progress)
        total = Exchange(channels.control).all_reduce(torch.tensor([float(rank)]))
        assert total.item() == 6 and progress.left == 1 and not progress.waiting
        names.append(channels.control.process_group.group_name)
        if generation % 2:
            if rank == 0:
                abort.set("broken on purpose")  # the others are in a collective that rank 0 never enters
            with pytest.raises(RuntimeError):
                Exchange(channels.control).all_reduce(torch.ones(1))
            assert rank == 0 or progress.failed_in == "control"
            abort.set("left")
        else:
            dist.barrier()
        channels.forget()
        world.close()
        used.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    return names, used[2], used[-1]


def test_generations_come_and_go_without_leaks(workers):
    results = workers.run(_generations, 4, 9, env=ENV)
    assert all(names == results[0][0] for names, _, _ in results) and len(set(results[0][0])) == 9
    assert all(early == late for _, early, late in results), [result[1:] for result in results]


def _hold_a_lease(rank, world_size, store_address):
    store = JobStore(lambda: connect(store_address), TOKEN)
    Lease(store, Seat(0, rank), 0, Progress(), TIMEOUTS).start()
    time.sleep(30)


@pytest.mark.parametrize(("stopped_s", "code"), [(0.5, None), (2.2, ExitCode.LEASE_EXPIRED)], ids=["blink", "long"])
def test_a_stop_longer_than_the_lease_ends_the_member(workers, stopped_s, code):
    expected = int(code) if code else -signal.SIGKILL
    run = workers.start(_hold_a_lease, 1, env=ENV, expect_exit={0: expected}, timeout_s=40)
    pid = run.pids[0]
    store = connect(run.store_address)
    assert wait_until(lambda: store.check(["ntp/job/beat/r0.s0/0"]), 10)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(stopped_s)
    os.kill(pid, signal.SIGCONT)
    if code is None:
        before = store.add("ntp/job/beat/r0.s0/0", 0)
        assert wait_until(lambda: store.add("ntp/job/beat/r0.s0/0", 0) > before + 3, 5)
        os.kill(pid, signal.SIGKILL)
    run.wait()


def _supervise(capfd, *orders: str) -> tuple[int, str]:
    topology = Topology.start([1, 1])
    supervisor = Supervisor(
        [sys.executable, "-m", "tests.dist.supervised_member", *orders],
        2,
        env={**ENV, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        cwd=str(REPOSITORY),
        seats=[str(seat) for seat in topology.members],
        policy=TolerateDeaths(topology.members, Timeouts(shutdown_grace_s=20.0)),
    )
    code = supervisor.run()
    return code, capfd.readouterr().err


@pytest.mark.slow
def test_the_supervisor_tolerates_a_death(capfd):
    code, text = _supervise(capfd, "r0.s0:kill")
    assert code == 0, text
    assert "the job finished" in text and "rank 0 (r0.s0) was ended by SIGKILL" in text


@pytest.mark.slow
def test_the_supervisor_tells_a_users_exception(capfd):
    code, text = _supervise(capfd, "r1.s0:raise")
    assert code == 1 and "r1.s0 ended the job" in text and "Traceback" in text
    assert "a mistake in the user's code" in text
