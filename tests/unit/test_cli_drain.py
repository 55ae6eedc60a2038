"""``lightning-ntp drain``: whom the words mean, what it writes, what it waits for; and how a user finds the job."""

from __future__ import annotations

import re
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_ntp.cli.main import main
from lightning_ntp.comm.rendezvous import connect_store, host_store
from lightning_ntp.config import Timeouts
from lightning_ntp.membership.events import Event, Kind
from lightning_ntp.membership.exits import ExitCode
from lightning_ntp.membership.founding import Founding
from lightning_ntp.membership.latest import advance_latest
from lightning_ntp.membership.store import JobStore
from lightning_ntp.membership.view import View
from lightning_ntp.membership.whereabouts import host_key, hosts_of, tell_host
from lightning_ntp.supervisor import Adaptive, HostedStore, Node, RemoteStore
from lightning_ntp.supervisor.access import Access
from lightning_ntp.supervisor.interfaces import interface_to
from lightning_ntp.supervisor.processes import Supervisor
from lightning_ntp.topology import Seat, Topology
from tests.unit.test_supervisor_policies import KILLED, SEATS, Scene, Site, StandIn

FOUNDING = Founding(Topology.start([2, 2]), Timeouts())
A, B, C, D = FOUNDING.members


class ServedJob:
    """A real store with a job of four members in it, two of them on each of two machines."""

    def __init__(self) -> None:
        self.server = host_store()
        self.address = f"127.0.0.1:{self.server.port}"
        self.store = JobStore(lambda: connect_store({"NTP_STORE": self.address}, 10.0), "token")
        FOUNDING.declare(self.store)
        for seat in FOUNDING.members:
            self.store.put(host_key(seat, 0), f"node{seat.replica}.cluster")

    def decide(self, seats=((A, B), (C, D)), generation: int = 0, events: int = 0) -> None:
        members = [seat for replica in seats for seat in replica]
        view = View.founding(FOUNDING.topology)
        zeros = dict.fromkeys(members, 0)
        view = replace(view, generation=generation, seats=seats, joined=zeros, incarnations=zeros, events=events)
        self.store.put(f"view/{generation}", view.to_json())
        advance_latest(self.store, generation)

    def events(self, kind: Kind = Kind.DRAIN) -> list[Seat]:
        found, position = [], 0
        while self.store.has_event(position):
            event = self.store.event(position)
            found += [event.seat] if event.kind is kind else []
            position += 1
        return found

    def drain(self, *words: str) -> int:
        return main(["drain", "--store", self.address, *words])


@pytest.fixture
def job(monkeypatch) -> ServedJob:
    monkeypatch.setenv("NTP_TOKEN", "token")
    monkeypatch.setenv("RES_OPTIONS", "attempts:0")
    return ServedJob()


@pytest.mark.parametrize(
    ("words", "seats"),
    [
        (["r0.s1"], [B]),
        (["r1.s0,r1.s1"], [C, D]),
        (["r1.s1", "r0.s0"], [A, D]),
        (["node1.cluster"], [C, D]),
        (["NODE0"], [A, B]),
        (["node1", "r0.s0"], [A, C, D]),
    ],
)
def test_whom_the_words_mean(job, capsys, words, seats):
    job.decide()
    assert job.drain("--no-wait", *words) == 0
    assert job.events() == seats
    assert capsys.readouterr().out == f"asked to hand over and leave: {', '.join(map(str, seats))}\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["r7.s0"], "r7.s0 is no seat of this job; it has r0.s0 r0.s1 r1.s0 r1.s1"),
        (["r1.s1"], "at r1.s1 sits no member now; the members are r0.s0 r0.s1 r1.s0"),
        (["there"], "'there' is no seat, such as r1.s3, and no machine of this job; its members run on: "
                    "node0.cluster: r0.s0 r0.s1; node1.cluster: r1.s0"),
        (["node0", "r1.s0"], "r0.s0 r0.s1 r1.s0: nobody would be left to take over the model"),
        ([","], "name a seat"),
    ],
)  # fmt: skip
def test_words_that_mean_nobody_ask_nobody(job, capsys, words, told):
    job.decide()
    job.store.append(Event(Kind.DEAD, D, text="killed"))
    assert job.drain(*words) == 2
    assert told in capsys.readouterr().err and not job.events()


def test_what_was_asked_before_counts(job, capsys):
    job.decide()
    assert job.drain("--no-wait", "node0") == 0
    assert job.drain("--no-wait", "node1") == 2
    assert "nobody would be left to take over the model (r0.s0 r0.s1 were asked to leave before)" in (
        capsys.readouterr().err
    )
    assert job.drain("--no-wait", "r1.s0") == 0 and job.events() == [A, B, C]


def test_a_short_name_of_two_machines(job, capsys):
    job.decide()
    job.store.put(host_key(D, 0), "node1.elsewhere")
    assert job.drain("node1") == 2
    assert "'node1' means several machines" in capsys.readouterr().err


def answer(job: ServedJob, *kinds: Kind, moves_on: bool = False) -> threading.Thread:
    """The members' part: after the requests, tell these events of C and D; or only go on in a view without them."""
    store = job.store.clone()

    def tell() -> None:
        for position in range(2):
            assert store.wait_event(position, 10.0)
        for seat, kind in zip((C, D), kinds, strict=False):
            store.append(Event(kind, seat, text="so it was"))
        if moves_on:  # and the events are deleted already
            job.store.delete(["ev/0", "ev/1"])
            job.decide(((A, B),), 1, events=7)

    thread = threading.Thread(target=tell)
    thread.start()
    return thread


def test_it_waits_until_they_have_left(job, capsys):
    job.decide()
    thread = answer(job, Kind.DONE, Kind.DONE)
    assert job.drain("node1") == 0
    assert capsys.readouterr().out.splitlines()[1] == "left: r1.s0, r1.s1"
    thread.join()


def test_a_view_without_them_says_it_too(job):
    job.decide()
    thread = answer(job, moves_on=True)
    assert job.drain("node1") == 0
    thread.join()


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        ([Kind.DONE, Kind.DEAD], "gone before it had handed over: r1.s1 (so it was); the others recover without it"),
        ([Kind.DONE, Kind.FATAL], "r1.s1 has ended the job: so it was"),
    ],
)
def test_it_tells_what_went_wrong_meanwhile(job, capsys, kinds, told):
    job.decide()
    thread = answer(job, *kinds)
    assert job.drain("node1") == 1
    assert told in capsys.readouterr().err
    thread.join()


def test_it_needs_a_job_that_runs(job, capsys, monkeypatch):
    assert job.drain("r0.s0") == 1
    assert "the job has no view yet" in capsys.readouterr().err
    job.decide()
    for seat in FOUNDING.members:
        job.store.append(Event(Kind.DONE, seat))
    assert job.drain("r0.s0") == 1
    assert "the job has ended: no member is left" in capsys.readouterr().err
    monkeypatch.setenv("NTP_TOKEN", "other")
    assert job.drain("r0.s0") == 1
    assert "no fault-tolerant job with this token" in capsys.readouterr().err


# What launchers tell


def test_launchers_say_where_their_members_run(job, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    tell_host(job.store, C, 3)
    assert hosts_of(job.store, {A: 0, C: 3, D: 9}) == {A: "node0.cluster", C: "here"}
    scene = Scene(Node((1, 2), 3))
    assert hosts_of(scene.store, dict.fromkeys(SEATS, 0)) == {SEATS[1]: "here", SEATS[2]: "here"}
    scene.end(1, KILLED)
    scene.say(Kind.RETURN, 1)
    assert scene.supervisor.started == [1] and hosts_of(scene.store, {SEATS[1]: 1}) == {SEATS[1]: "here"}


def test_who_has_left_is_not_taken_for_the_end_of_the_job():
    scene = Scene()
    scene.say(Kind.DONE, 2, text="it has handed over its part")
    scene.end(2, ExitCode.DRAINED)
    assert not scene.policy.host.is_finished() and scene.policy.host.facts.departed == {(SEATS[2], 0)}
    for rank in (0, 1):
        scene.end(rank, KILLED)
    assert scene.exit_code == KILLED
    assert scene.note.startswith("handed over and left: r1.s0; lost on the way: rank 0 (r0.s0) was ended by SIGKILL;")


def test_a_node_whose_members_have_all_left_ends_well():
    scene = Scene(Node((1, 2), 3), is_host=False)
    for rank in (1, 2):
        scene.say(Kind.DONE, rank, text="it has handed over its part")
        scene.end(rank, ExitCode.DRAINED)
    assert scene.exit_code == 0 and not scene.policy.waits(scene.supervisor)
    assert scene.note == (
        "handed over and left: r0.s1, r1.s0; no member is left here, but the job goes on elsewhere"
    )


@pytest.mark.parametrize("token", [None, "secret"])
def test_a_user_finds_the_store_and_a_token_that_was_made(capsys, token):
    policy = Adaptive(token, founding=FOUNDING)
    supervisor = StandIn(Site(host_store()), Node.alone(4))
    policy.on_start(supervisor)
    line, = capsys.readouterr().err.splitlines()
    match = re.fullmatch(r"lightning_ntp: store here:1, token (as given|in (\S+)) \(for lightning-ntp drain.*\)", line)
    assert match and policy.token not in line
    path = Path(match[2]) if match[2] else None
    assert (path is None) == (token == "secret")
    if path is not None:
        assert path.read_text().strip() == policy.token
        assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent)] == [0o600, 0o700]
    policy.on_finish(supervisor, 0)
    assert path is None or not path.parent.exists()


def test_a_token_that_cannot_be_written_does_not_stop_the_job(monkeypatch, caplog, capsys):
    monkeypatch.setattr("tempfile.tempdir", "/proc/nowhere")
    access = Access("here:1", "secret")
    access.open()
    access.close()
    assert "the token is not written" in caplog.text and not capsys.readouterr().err


def test_gloo_uses_the_interface_that_leads_to_the_store(monkeypatch):
    assert interface_to("127.0.0.1") == "lo" == interface_to("localhost")
    assert interface_to("no.such.host.invalid") is None
    assert HostedStore("0.0.0.0").interface() is None  # other machines reach it by an address unknown here
    assert RemoteStore("127.0.0.1:29500").interface() == "lo"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert Supervisor(["true"], 1).member_env(0)["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert Supervisor(["true"], 1).member_env(0)["GLOO_SOCKET_IFNAME"] == "eth7"
