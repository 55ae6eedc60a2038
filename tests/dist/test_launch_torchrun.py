"""torchrun, with and without our ``run`` between it and the members."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.launched import LIGHT, Launched, launched

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node")


@pytest.fixture
def job(tmp_path) -> Iterator[Launched]:
    with launched(tmp_path) as job:
        job.env["NTP_TOKEN"] = ""  # made of what torchrun says to all
        yield job


def test_through_run_members_may_die_rank_0_too(job):
    torchrun = job.start(*TORCHRUN, "3", LIGHT, "run", *job.member("2,1"))
    job.is_in("r0.s0.0", "r0.s1.0", "r1.s0.0")
    job.kill("r1.s0.0")
    job.is_in("r0.s0.0", "r0.s1.0")
    job.kill("r0.s0.0")
    job.is_in("r0.s1.0")
    job.let_finish()
    code, text = job.end(torchrun)
    assert code == 0, text
    for rank, seat in ((2, "r1.s0"), (0, "r0.s0")):
        assert f"rank {rank} of the job finished" in text
        assert f"lost on the way: rank {rank} ({seat}) was ended by SIGKILL" in text
    assert job.facts("r1.s0.0")["LOCAL_RANK"] == "2" and job.facts("r1.s0.0")["LOCAL_WORLD_SIZE"] == "3"


def test_plain_torchrun_ends_the_job_with_the_first_death(job):
    torchrun = job.start(*TORCHRUN, "2", *job.member("1,1", "greet"))
    job.is_in("r0.s0.0", "r1.s0.0")
    job.kill("r1.s0.0")
    code, text = job.end(torchrun)
    assert code == 1 and "Signal 9 (SIGKILL)" in text
    assert not list(job.directory.glob("*.done"))
