"""One machine: the user finds the job by what its launcher says, drains a member, and has another one started there."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launched import LIGHT, Launched, launched, until
from tests.support.light import REPOSITORY

TRAINER = str(REPOSITORY / "tests/dist/light_trainer.py")


@pytest.fixture
def job(tmp_path) -> Iterator[Launched]:
    with launched(tmp_path) as job:
        del job.env["NTP_TOKEN"], job.env["GLOO_SOCKET_IFNAME"]
        yield job


# The same with processes on three machines is in test_namespaces.py.
@pytest.mark.slow
def test_drain_and_join_by_what_the_launcher_says(job):
    run = job.run("--nproc-per-node", "2", TRAINER, str(job.directory), "1,1")
    said = next(line for line in run.stderr if line.startswith("lightning_ntp: store"))
    store, token = re.match(r"lightning_ntp: store (\S+), token in (\S+) ", said).groups()
    assert stat.S_IMODE(Path(token).stat().st_mode) == 0o600 and Path(token).read_text().strip() not in said

    def ask(verb: str) -> str:
        process = job.start(LIGHT, "cli", verb, "r1.s0", "--store", store, "--token-file", token)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        return out

    def is_written(member: str, event: str) -> bool:
        path = job.directory / member
        return path.exists() and f'"event": "{event}"' in path.read_text()

    until(lambda: is_written("r1.s0.0", "step"), "no step was taken")
    assert ask("drain") == "asked to hand over and leave: r1.s0\nleft: r1.s0\n"
    until(lambda: is_written("r1.s0.0", "left"), "it has not left")
    ask("join")
    until(lambda: is_written("r1.s0.1", "step"), "nobody has come in its place")
    job.let_finish()
    code, text = job.end(run)
    assert code == 0 and "finished" in text and "handed over and left: r1.s0" in text
    assert is_written("r1.s0.1", "done") and not Path(token).parent.exists()
