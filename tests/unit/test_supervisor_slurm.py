"""What SLURM's variables say of a job's nodes."""

from __future__ import annotations

import os

import pytest
from lightning.fabric.plugins.environments import SLURMEnvironment

from lightning_ntp.errors import LaunchError
from lightning_ntp.supervisor import Supervisor
from lightning_ntp.supervisor.slurm import TASK_VARIABLES, SlurmStep, expand_hosts

# As srun sets them on node 2 of 4, one task a node.
ENV = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NAME": "train",
    "SLURM_JOB_NODELIST": "gpu[07-09,11]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "4",
    "SLURM_NODEID": "2",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-09,11]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_TASKS_PER_NODE": "1(x4)",
}


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("a", "a"),
        ("a,b c", "a b c"),
        ("a[01-03,07],b", "a01 a02 a03 a07 b"),
        ("n[9-11]", "n9 n10 n11"),
        ("r[1-2]n[08-09].x,login-1", "r1n08.x r1n09.x r2n08.x r2n09.x login-1"),
        ("127.0.0.[1-2]", "127.0.0.1 127.0.0.2"),
        ("gpu-a100-[5]", "gpu-a100-5"),
    ],
)
def test_the_short_form_of_hosts(nodelist, hosts):
    assert list(expand_hosts(nodelist)) == hosts.split()


@pytest.mark.parametrize("nodelist", ["a[1-", "a[x]", "a]", "a[1,,2]", "a,,b"])
def test_another_form_is_refused(nodelist):
    with pytest.raises(LaunchError, match="cannot be read"):
        list(expand_hosts(nodelist))


def test_a_step_names_the_nodes_and_the_stores_place():
    step = SlurmStep.of(ENV)
    assert step == SlurmStep(4, 2, ("gpu07", "10.0.0.7"), 15_000 + 4567)
    assert step.store_address() == "gpu07:19567"
    assert SlurmStep.of({**ENV, "SLURM_STEP_ID": "1"}).port == 19_668
    bare = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NNODES", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_PROCID")
    env = {name: ENV[name] for name in bare} | {"SLURM_STEPID": "0"}
    assert SlurmStep.of(env) == SlurmStep(4, 2, ("gpu07",), 19_567)


def test_a_step_may_have_fewer_nodes_than_the_job():
    two = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "gpu[08,11]"}
    step = SlurmStep.of({**ENV, **two, "SLURM_NODEID": "1"})
    assert (step.num_nodes, step.index, step.hosts[0]) == (2, 1, "gpu08")


def test_node_0_tells_others_an_address_that_is_not_its_own_loopback():
    on_node_0 = SlurmStep(2, 0, ("localhost", "10.0.0.7"), 20_000)
    assert on_node_0.store_address() == "10.0.0.7:20000"
    assert SlurmStep(2, 0, ("127.0.0.1",), 20_000).store_address() == "127.0.0.1:20000"
    with pytest.raises(LaunchError, match="localhost mean a loopback address.*--store HOST:PORT"):
        SlurmStep(2, 0, ("localhost",), 20_000).store_address()


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_JOB_ID": None},
        {"SLURM_NNODES": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"},
        # A shell in an allocation, and a batch script on one node with tasks of its own.
        {"SLURM_JOB_NAME": "bash", **dict.fromkeys(name for name in ENV if "STEP" in name or "LAUNCH" in name)},
        {"SLURM_NNODES": "1", **dict.fromkeys(name for name in ENV if "STEP" in name or "LAUNCH" in name)},
    ],
    ids=["none", "one node", "shell", "batch"],
)
def test_where_there_is_no_step_of_several_nodes(change):
    assert SlurmStep.of(changed(change)) is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"SLURM_STEP_NUM_TASKS": "32"}, "SLURM starts 32 tasks on 4 nodes.*srun --ntasks-per-node=1 --no-kill"),
        (dict.fromkeys(name for name in ENV if "STEP" in name or "LAUNCH" in name), "srun did not start this process"),
        ({"SLURM_NODEID": "x"}, "SLURM_NODEID='x' must be a whole number"),
        (
            {"SLURM_STEP_NODELIST": None, "SLURM_JOB_NODELIST": None, "SLURM_LAUNCH_NODE_IPADDR": None},
            "SLURM names no nodes",
        ),
    ],
)
def test_what_cannot_work_is_told(change, told):
    with pytest.raises(LaunchError, match=told):
        SlurmStep.of(changed(change))


def test_lightning_does_not_take_a_member_for_a_task_of_slurm(monkeypatch):
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    assert SLURMEnvironment.detect()
    env = Supervisor(["true"], 1, hidden=TASK_VARIABLES).member_env(0)
    monkeypatch.setattr(os, "environ", env)
    assert not SLURMEnvironment.detect() and SLURMEnvironment.job_id() == 1234567


def changed(change: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in {**ENV, **change}.items() if value is not None}
