"""``lightning-ntp store`` and ``lightning-ntp join``: what they refuse, and what ``join`` writes."""

from __future__ import annotations

import pytest

from lightning_ntp.cli.main import main
from lightning_ntp.comm.rendezvous import host_store
from lightning_ntp.config import Timeouts
from lightning_ntp.membership.events import Kind
from lightning_ntp.membership.founding import Founding
from lightning_ntp.membership.store import JobStore
from lightning_ntp.topology import Seat, Topology


@pytest.fixture
def served(monkeypatch):
    """Address of a real store, and the job in it."""
    server = host_store()
    monkeypatch.setenv("NTP_TOKEN", "token")
    monkeypatch.setenv("RES_OPTIONS", "attempts:0")
    return f"127.0.0.1:{server.port}", JobStore(lambda: server, "token")


def test_join_asks_for_seats_of_the_job(served, capsys):
    address, store = served
    Founding(Topology.start([2, 1]), Timeouts()).declare(store)
    assert main(["join", "--store", address, "r0.s1", "r1.s0"]) == 0
    assert capsys.readouterr().out == "asked for a process at r0.s1, r1.s0\n"
    events = [store.event(position) for position in range(2)]
    assert [(event.kind, event.seat) for event in events] == [(Kind.RETURN, Seat(0, 1)), (Kind.RETURN, Seat(1, 0))]
    assert main(["join", "--store", address, "r7.s0"]) == 2
    assert "r7.s0 is no seat of this job; it has r0.s0 r0.s1 r1.s0" in capsys.readouterr().err


def test_join_needs_a_job_with_the_same_token(served, monkeypatch, capsys):
    address, store = served
    assert main(["join", "--store", address, "r0.s0"]) == 1
    Founding(Topology.start([2, 1]), Timeouts()).declare(store)
    monkeypatch.setenv("NTP_TOKEN", "other")
    assert main(["join", "--store", address, "r0.s0"]) == 1
    assert capsys.readouterr().err.count("no fault-tolerant job with this token runs there") == 2
    monkeypatch.delenv("NTP_TOKEN")
    assert main(["join", "--store", address, "r0.s0"]) == 1
    assert "the job's token is missing" in capsys.readouterr().err


def test_store_tells_what_it_cannot_use(served, tmp_path, capsys):
    address, _ = served
    assert main(["store", "--bind", "nowhere"]) == 2
    assert main(["store", "--bind", address]) == 1
    assert main(["store", "--bind", "127.0.0.1:0", "--token-file", str(tmp_path / "no" / "token")]) == 2
    (tmp_path / "empty").touch()
    assert main(["store", "--bind", "127.0.0.1:0", "--token-file", str(tmp_path / "empty")]) == 2
    told = capsys.readouterr().err
    for text in ("--bind='nowhere' must have", "Address already in use", "cannot be written", "is empty"):
        assert text in told
