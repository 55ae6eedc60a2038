"""The command line of ``python -m lightning_ntp.run``: which part of which job it starts, with which store."""

from __future__ import annotations

import os
import re
import socket
from types import SimpleNamespace

import pytest

from lightning_ntp import run
from lightning_ntp.comm.rendezvous import job_token
from lightning_ntp.errors import ConfigError, LaunchError
from lightning_ntp.supervisor import AgentStore, HostedStore, Node, RemoteStore
from tests.unit.test_supervisor_slurm import ENV as SLURM

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", "MASTER_ADDR": "m",
    "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "id", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """A function that gives the supervisor that a command line asks for; it is not run."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "NTP_TOKEN", "LOCAL_RANK", "TORCHEL"))]:
        monkeypatch.delenv(name)
    found, script = [], tmp_path / "train.py"
    script.touch()
    monkeypatch.setattr(run.Supervisor, "run", lambda self: found.append(self) or 0)

    def ask(*words: str, env: dict[str, str] | None = None):
        for name, value in (env or {}).items():
            monkeypatch.setenv(name, value)
        code = run.main([*words, str(script)])
        return found.pop() if code == 0 else code

    return ask


def test_one_machine(asked):
    it = asked("--nproc-per-node", "4")
    assert it.node == Node.alone(4) and it.site == HostedStore() and it.policy.token
    assert asked("--nproc-per-node", "4").policy.token != it.policy.token
    assert asked("--nproc-per-node", "4", "--store", "127.0.0.1:7").site == HostedStore("127.0.0.1", 7)


def test_several_machines(asked):
    words, env = ("--nproc-per-node", "4", "--nnodes", "2", "--store", "10.0.0.1:7"), {"NTP_TOKEN": "secret"}
    first = asked(*words, env=env)
    assert first.node == Node.one_of(2, 0, 4) and first.site == HostedStore("10.0.0.1", 7, is_shared=True)
    second = asked(*words, "--node-rank", "1")
    assert second.site == RemoteStore("10.0.0.1:7") and second.policy.token == "secret"
    assert second.node.ranks == (4, 5, 6, 7)
    assert second.node.member_env(6) == {
        "RANK": "6", "LOCAL_RANK": "2", "NODE_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4",
    }  # fmt: skip
    assert asked(*words, "--no-host-store").site == RemoteStore("10.0.0.1:7")
    assert asked(*words, "--node-rank", "1", "--host-store").site.is_host


def test_slurm(asked):
    it = asked("--nproc-per-node", "4", env={**SLURM, "NTP_TOKEN": "secret"})
    assert it.node == Node.one_of(4, 2, 4) and it.site == RemoteStore("gpu07:19567")
    assert asked("--nproc-per-node", "4", "--store", "10.0.0.9:7").site == RemoteStore("10.0.0.9:7")
    assert asked("--nproc-per-node", "4", "--nnodes", "1").node == Node.alone(4)


def test_torchrun(asked):
    it = asked(env=TORCHRUN)
    assert it.node.ranks == (5,) and it.node.is_shim and isinstance(it.site, AgentStore)
    assert it.policy.token == job_token(TORCHRUN)
    env = it.member_env(5)
    assert {name: env[name] for name in TORCHRUN} == TORCHRUN and env["NTP_WORLD_SIZE"] == "8"
    assert "NTP_STORE" not in env


@pytest.mark.parametrize(
    ("words", "env", "told"),
    [
        (["--nnodes", "2", "--store", "h:1"], {}, "job's token is missing.*export NTP_TOKEN="),
        (["--nnodes", "2"], {"NTP_TOKEN": "x"}, "--store is missing"),
        (["--nnodes", "2", "--node-rank", "2", "--store", "h:1"], {}, "--node-rank=2 is outside the nodes 0..1"),
        (["--store", "nowhere"], {}, "--store='nowhere' must have the form host:port"),
        (["--no-host-store"], {}, "--no-host-store: where is the store"),
        (["--token-file", "/nowhere"], {}, "--token-file=/nowhere: it cannot be read"),
        ([], SLURM, "export NTP_TOKEN="),
        (["--join", "r0.s0", "--store", "h:1"], {"NTP_TOKEN": "x"}, "--join=r0.s0 needs --store HOST:PORT.*no"),
        ([], TORCHRUN, "--nproc-per-node=2 inside a process that is a member already"),
    ],
)
def test_what_cannot_work_is_told(asked, capsys, words, env, told):
    assert asked("--nproc-per-node", "2", *words, env=env) == 2
    assert re.search(told, capsys.readouterr().err)


def test_a_store_that_cannot_be_had_is_told(monkeypatch):
    with pytest.raises(LaunchError, match=r"no store at 127.0.0.1:1 within 0 s.*--store the same on all nodes"):
        RemoteStore("127.0.0.1:1").open(0.1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(LaunchError, match="cannot host.*Address already in use.*--no-host-store"):
            HostedStore("127.0.0.1", taken.getsockname()[1]).open()
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    with pytest.raises(LaunchError, match="'myself' means 127.0.1.1 on this machine"):
        HostedStore("myself", 0, is_shared=True).open()


def test_a_token_is_read_from_a_file_or_made_of_what_torchrun_says(tmp_path):
    with pytest.raises(LaunchError, match="NTP_TOKEN"):
        job_token({})
    assert job_token({"NTP_TOKEN": "x", **TORCHRUN}) == "x"
    assert job_token(TORCHRUN) != job_token({**TORCHRUN, "TORCHELASTIC_RUN_ID": "other"})
    (tmp_path / "token").write_text(" secret\n")
    assert run._given_token(SimpleNamespace(token_file=str(tmp_path / "token"))) == "secret"
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        run._given_token(SimpleNamespace(token_file=str(tmp_path / "token")))
