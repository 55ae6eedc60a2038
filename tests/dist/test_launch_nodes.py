"""Several machines: launchers of one job that share a store. Here all are processes on the loopback interface."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

from lightning_ntp.membership.exits import ExitCode
from tests.support import processes
from tests.support.launched import LIGHT, TOKEN, Launched, free_address, launched, until


@pytest.fixture
def job(tmp_path) -> Iterator[Launched]:
    with launched(tmp_path) as job:
        yield job


def start_node(job: Launched, index: int, address: str, *words: str, num_nodes: int = 2) -> subprocess.Popen:
    options = ("--nnodes", str(num_nodes), "--node-rank", str(index), "--store", address, "--nproc-per-node", "1")
    return job.run(*options, *words, *job.member(",".join("1" * num_nodes)))


def test_deaths_of_a_member_and_of_a_whole_node(job, tmp_path):
    address, token = free_address(), tmp_path / "token"
    token.write_text(TOKEN)
    del job.env["NTP_TOKEN"]
    nodes = [start_node(job, index, address, "--token-file", str(token), num_nodes=3) for index in (2, 0, 1)]
    job.is_in("r0.s0.0", "r1.s0.0", "r2.s0.0")
    facts, names = job.facts("r2.s0.0"), ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    assert [facts[name] for name in names] == ["2", "0", "2", "3", "1"]

    job.kill("r1.s0.0")
    code, text = job.end(nodes[2])
    assert code == 0 and "node 1 of the job finished" in text
    assert "rank 1 (r1.s0) was ended by SIGKILL; no member is left here, but the job goes on elsewhere" in text
    job.is_in("r0.s0.0", "r2.s0.0")

    pid = job.facts("r2.s0.0")["pid"]
    nodes[0].kill()
    until(lambda: not processes.is_running(pid), "the members of a launcher that died live on")
    job.is_in("r0.s0.0")  # the other launcher has declared the silent one dead
    job.let_finish()
    code, text = job.end(nodes[1])
    assert code == 0 and "r2.s0 counts as dead: it gave no sign of life" in text


def test_the_death_of_the_stores_host_ends_everything(job):
    address = free_address()
    host, other = (start_node(job, index, address) for index in (0, 1))
    job.is_in("r0.s0.0", "r1.s0.0")
    host.kill()
    code, text = job.end(other)
    assert code == ExitCode.STORE_LOST
    assert f"exit code 82: the job's store at {address} is gone, and with it the job" in text


@pytest.mark.slow
def test_a_store_on_a_machine_of_its_own(job, tmp_path):
    address, token = free_address(), tmp_path / "token"
    del job.env["NTP_TOKEN"]
    store = job.start(LIGHT, "cli", "store", "--bind", address, "--token-file", str(token))
    assert store.stdout.readline() == f"lightning-ntp store: listening at {address}\n"
    assert token.stat().st_mode & 0o777 == 0o600
    options = ("--store", address, "--no-host-store", "--token-file", str(token), "--nproc-per-node", "1")
    node = job.run(*options, *job.member("1"))
    job.is_in("r0.s0.0")
    time.sleep(0.3)  # until the launcher knows the job's limits, too
    store.send_signal(signal.SIGSTOP)  # it answers no more, and no connection breaks
    code, text = job.end(node)
    assert code == ExitCode.STORE_LOST and f"the job's store at {address} does not answer" in text
    store.send_signal(signal.SIGCONT)
    store.send_signal(signal.SIGTERM)
    assert job.end(store)[0] == 0


@pytest.mark.slow
def test_a_failure_on_one_node_ends_a_script_that_tolerates_nothing(job):
    address = free_address()
    words = ("plain", "early:r1.s0=7")
    nodes = [
        job.run(
            "--nnodes", "2", "--node-rank", str(index), "--store", address, "--nproc-per-node", "1",
            "--grace-period", "0.2", *job.member("1,1", *words),
        )
        for index in (0, 1)
    ]  # fmt: skip
    for index, told in ((0, "node 1: rank 1 exited with code 7"), (1, "rank 1 exited with code 7")):
        code, text = job.end(nodes[index])
        assert code == 7 and f"node {index} of the job failed" in text and told in text


def test_slurm_starts_one_launcher_a_node(job):
    number = next(n for n in range(10_000) if is_free(15_000 + n))
    step = {
        "SLURM_JOB_ID": str(70_000 + number), "SLURM_STEP_ID": "0", "SLURM_NNODES": "2", "SLURM_NTASKS": "2",
        "SLURM_JOB_NODELIST": "127.0.0.[1-2]", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "SLURM_JOB_NAME": "train",
    }  # fmt: skip
    nodes = [
        job.run(
            "--nproc-per-node", "1", *job.member("1,1"),
            env={**step, "SLURM_NODEID": str(index), "SLURM_PROCID": str(index), "SLURM_LOCALID": "0"},
        )
        for index in (0, 1)
    ]  # fmt: skip
    job.is_in("r0.s0.0", "r1.s0.0")
    for rank in ("0", "1"):
        facts = job.facts(f"r{rank}.s0.0")
        assert (facts["RANK"], facts["NODE_RANK"], facts["SLURM_NTASKS"]) == (rank, rank, None)
    job.let_finish()
    assert [job.end(node)[0] for node in nodes] == [0, 0]


def is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
