"""``python -m lightning_ntp.run`` and its members as processes, on one machine: deaths, returns, ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_ntp.membership.events import Event, Kind
from lightning_ntp.topology import Seat
from tests.support.launched import Launched, free_address, launched


@pytest.fixture
def job(tmp_path) -> Iterator[Launched]:
    with launched(tmp_path) as job:
        yield job


@pytest.mark.slow
def test_a_failure_before_that_ends_the_job(job):
    run = job.run("--grace-period", "0.3", "--nproc-per-node", "2", *job.member("1,1", "plain", "early:r1.s0=3"))
    code, text = job.end(run)
    assert code == 3 and "the job failed" in text and "rank 1 exited with code 3" in text


def test_a_member_comes_back_once(job):
    run = job.run("--nproc-per-node", "2", *job.member("1,1", "mode=once"))
    job.is_in("r0.s0.0", "r1.s0.0")
    job.kill("r1.s0.0")
    job.is_in("r0.s0.0", "r1.s0.1")
    assert job.facts("r1.s0.1")["RANK"] == "1"
    job.kill("r1.s0.1")
    job.is_in("r0.s0.0")
    job.let_finish()
    code, text = job.end(run)
    assert code == 0 and "was started again once, as respawn='once' says, and stays dead" in text
    assert not (job.directory / "r1.s0.2").exists()


def test_the_first_members_say_that_deaths_are_tolerated_and_seats_are_filled_again(job):
    address = free_address()
    run = job.run("--store", address, "--nproc-per-node", "3", *job.member("2,1"))
    job.is_in("r0.s0.0", "r0.s1.0", "r1.s0.0")
    assert job.facts("r1.s0.0")["LOCAL_RANK"] == job.facts("r1.s0.0")["RANK"] == "2"
    job.kill("r0.s0.0")
    job.is_in("r0.s1.0", "r1.s0.0")
    store = job.store(address)
    for seat in (Seat(0, 1), Seat(0, 0)):  # at the first one a process still runs
        store.append(Event(Kind.RETURN, seat))
    job.is_in("r0.s1.0", "r0.s0.1", "r1.s0.0")
    assert not (job.directory / "r0.s1.1").exists()

    job.kill("r1.s0.0")
    job.is_in("r0.s1.0", "r0.s0.1")
    guest = job.run("--store", address, "--join", "r1.s0", *job.member("2,1"))
    job.is_in("r0.s1.0", "r0.s0.1", "r1.s0.1")
    job.let_finish()
    for process, told in ((run, "the job finished after"), (guest, "")):
        code, text = job.end(process)
        assert code == 0 and told in text, text
        assert ("lost on the way: rank 0 (r0.s0) was ended by SIGKILL; rank 2 (r1.s0)" in text) == bool(told)
    assert job.facts("r1.s0.1.done") == {} and job.facts("r1.s0.1")["WORLD_SIZE"] == "3"


def test_a_users_exception_ends_the_job_with_its_text(job):
    run = job.run("--nproc-per-node", "2", *job.member("1,1", "raise:r1.s0", "mode=always"))
    code, text = job.end(run)
    summary = text[text.index("lightning_ntp: the job failed") :]
    line = "r1.s0 ended the job: ValueError: a mistake in the user's code (its traceback is above)"
    assert code == 1 and summary.rstrip().endswith(line)
    assert not (job.directory / "r1.s0.1").exists()


@pytest.mark.slow
def test_who_waits_to_return_does_not_keep_the_job(job):
    run = job.run("--nproc-per-node", "2", *job.member("1,1", "mode=always"))
    job.is_in("r0.s0.0", "r1.s0.0")
    job.kill("r1.s0.0")
    job.is_in("r0.s0.0")
    job.let_finish()
    code, text = job.end(run)
    assert code == 0, text
