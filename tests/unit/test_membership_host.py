"""The hosts of several machines: who watches whom, what is known of members elsewhere."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from lightning_ntp.config import Timeouts
from lightning_ntp.membership.events import Event, Kind
from lightning_ntp.membership.host import Host
from lightning_ntp.membership.latest import advance_latest
from lightning_ntp.membership.lease import beat_key
from lightning_ntp.membership.store import JobStore
from lightning_ntp.membership.view import View
from lightning_ntp.topology import Seat, Topology

A, B, C, D = SEATS = Topology.start([2, 2]).members
TIMEOUTS = Timeouts()


class Scene:
    """Two or more hosts on one store and one clock."""

    def __init__(self) -> None:
        self.now, client = 0.0, dist.HashStore()
        self.store = JobStore(lambda: client, "token")
        self.killed: list[Seat] = []
        self.hosts: list[Host] = []

    def clock(self) -> float:
        return self.now

    def host(self, *here: Seat, watches_all: bool = False) -> Host:
        def kill(seat: Seat) -> bool:
            self.killed.append(seat)
            return seat in here

        elsewhere = {seat: 0 for seat in SEATS if seat not in here}
        host = Host(self.store, here, TIMEOUTS, kill, self.clock, elsewhere=elsewhere, watches_all=watches_all)
        self.hosts.append(host)
        return host

    def go_on(self, seconds: float, beating=SEATS, incarnation: int = 0) -> None:
        for _ in range(round(seconds / TIMEOUTS.beat_s)):
            self.now += TIMEOUTS.beat_s
            for seat in beating:
                self.store.count(beat_key(seat, incarnation))
            for host in self.hosts:
                host.poll()


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_the_stores_host_declares_silent_members_of_another_machine(scene):
    host = scene.host(A, B, watches_all=True)
    scene.go_on(1)
    scene.go_on(TIMEOUTS.silence_s - 0.2, beating=(A, B))
    assert not host.facts.gone
    scene.go_on(0.6, beating=(A, B))
    assert host.facts.gone == {(C, 0), (D, 0)} and "no sign of life" in host.facts.causes[C, 0]


def test_a_member_is_killed_by_its_own_launcher_even_if_others_declared_it_first(scene):
    first, second = scene.host(A, B, watches_all=True), scene.host(C, D)
    scene.go_on(1)
    scene.store.append(Event(Kind.DEAD, D))
    scene.go_on(TIMEOUTS.silence_s + 0.5, beating=(A, B, C))
    assert scene.killed == [D] and (D, 0) in first.facts.gone
    second.ended(D, "killed")
    scene.go_on(1, beating=(A, B, C))
    assert scene.killed == [D]


def test_without_a_host_of_the_store_the_lowest_live_seats_launcher_watches_all(scene):
    hosts = [scene.host(seat) for seat in SEATS]
    scene.go_on(1)
    assert [host._watched()[0] for host in hosts] == [True, False, False, False]
    assert hosts[2]._watched()[1] == [A, C]
    scene.go_on(TIMEOUTS.silence_s + 0.5, beating=(A, B, C))
    assert hosts[0].facts.gone == {(D, 0)}
    scene.hosts.remove(hosts[0])  # A's machine is lost, with its launcher
    scene.go_on(TIMEOUTS.silence_s + 0.5, beating=(B, C))
    assert hosts[1].facts.gone == {(A, 0), (D, 0)} and hosts[1]._watched()[0]
    scene.go_on(TIMEOUTS.silence_s + 1.5, beating=(B,))
    assert (C, 0) in hosts[1].facts.gone


def test_a_joiner_elsewhere_is_watched_as_soon_as_it_waits(scene):
    host = scene.host(A, B, watches_all=True)
    scene.go_on(0.5)
    scene.store.append(Event(Kind.DEAD, C))
    scene.store.append(Event(Kind.WAITING, C, 1))
    scene.go_on(0.5, beating=(C,), incarnation=1)
    scene.go_on(TIMEOUTS.silence_s + 0.5, beating=(A, B, D))
    assert host.facts.gone == {(C, 0), (C, 1)}


def test_one_that_finished_elsewhere_may_be_silent(scene):
    host = scene.host(A, B, watches_all=True)
    scene.go_on(0.5)
    for seat in (C, D):
        scene.store.append(Event(Kind.DONE, seat))
    scene.go_on(TIMEOUTS.silence_s + 0.5, beating=(A, B))
    assert not host.facts.gone and not scene.killed
    assert host.live() == {A, B} and not host.is_finished()


def test_who_lives_is_said_by_the_newest_view(scene):
    host = scene.host(A, B, watches_all=True)
    assert host.live() == set(SEATS)
    view = View(3, 2, ((A,), (C,)), joined={A: 0, C: 3}, incarnations={A: 0, C: 2})
    scene.store.put("view/3", view.to_json())
    advance_latest(scene.store, 3)
    scene.store.append(Event(Kind.DEAD, C, 1))
    host.poll()
    assert host.live() == {A, C}
    for seat, number in ((A, 0), (C, 2)):
        scene.store.append(Event(Kind.DONE, seat, number))
    host.poll()
    assert host.is_finished() and host.live() == set()


def test_one_that_comes_late_reads_on_from_the_newest_view(scene):
    for seat in (B, D):
        scene.store.append(Event(Kind.DEAD, seat))
    view = View(1, 2, ((A,), (C,)), joined={A: 0, C: 0}, incarnations={A: 0, C: 0}, events=2)
    scene.store.put("view/1", view.to_json())
    advance_latest(scene.store, 1)
    scene.store.delete(["ev/0", "ev/1"])
    host = scene.host()
    scene.store.append(Event(Kind.RETURN, B), 2)
    host.poll()
    assert host.facts.read == 3 and host.take_returns() == [B] and host.take_returns() == []
