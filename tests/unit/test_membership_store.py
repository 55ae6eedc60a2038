"""The job's store: the log without holes, decisions made once, and what is refused."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_ntp.comm.rendezvous import host_store
from lightning_ntp.errors import MembershipError
from lightning_ntp.membership.cleaning import clean
from lightning_ntp.membership.events import MAX_TEXT, Event, Facts, Kind
from lightning_ntp.membership.latest import advance_latest, latest_generation
from lightning_ntp.membership.store import MAX_MESSAGE_BYTES, JobStore
from lightning_ntp.membership.view import View
from lightning_ntp.topology import Seat, Topology

SEAT = Seat(1, 3)


@pytest.fixture(params=["hash", "tcp"])
def connect(request):
    if request.param == "hash":
        store = dist.HashStore()
        yield lambda: store
        return
    server = host_store()
    limit = timedelta(seconds=5)
    yield lambda: dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=limit)


@pytest.fixture
def store(connect):
    return JobStore(connect, "secret")


def test_a_log_of_many_writers_has_no_holes(store):
    def write(name: int) -> None:
        mine = store.clone()
        for index in range(20):
            mine.append(Event(Kind.OVER, SEAT, generation=index, text=str(name)))

    threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = [store.event(position) for position in range(80)]
    assert sorted((event.text, event.generation) for event in events) == sorted(
        (str(name), index) for name in range(4) for index in range(20)
    )
    assert not store.has_event(80)


def test_the_first_decision_counts(store):
    assert store.decide("view/0", {"by": 1}) == {"by": 1}
    assert store.clone().decide("view/0", {"by": 2}) == {"by": 1}
    assert store.get("view/0") == {"by": 1}


def test_many_deciders_get_one_answer(store):
    answers = []
    threads = [
        threading.Thread(target=lambda i=i: answers.append(store.clone().decide("view/1", i))) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8 and len(set(answers)) == 1


@pytest.mark.parametrize("raw", ["", "nonsense", "1 abc {}", "9 abc {}", "1  ", "\udcff", "[" * 100_000])
def test_what_is_malformed_is_refused_and_logged(store, raw, caplog):
    value = raw.encode(errors="surrogateescape")
    store.client.set("ntp/job/x", value)
    store.client.set("ntp/job/ev/0", value)
    with caplog.at_level(logging.WARNING):
        assert store.get("x") is None and store.event(0) is None
    assert "refused" in caplog.text
    assert store.append(Event(Kind.DONE, SEAT)) == (1 if raw else 0)


def test_a_valid_decision_replaces_a_malformed_one(store):
    store.client.set("ntp/job/view/0", "garbage")
    assert store.decide("view/0", 1) == 1 and store.decide("view/0", 2) == 1


def test_another_token_is_refused(store, connect, caplog):
    stranger = JobStore(connect, "guessed")
    stranger.put("joiner/r0.s0", {"fresh": True})
    stranger.append(Event(Kind.DEAD, SEAT))
    assert store.get("joiner/r0.s0") is None and store.event(0) is None
    assert "signature" in caplog.text


def test_a_message_counts_under_its_own_key_only(store):
    store.put("join/0/r0.s0", 1)
    store.client.set("ntp/job/join/1/r0.s0", store.client.get("ntp/job/join/0/r0.s0"))
    assert store.get("join/0/r0.s0") == 1 and store.get("join/1/r0.s0") is None


def test_another_protocol_is_refused_with_both_versions(store):
    with pytest.raises(MembershipError, match="no protocol"):
        store.check_version(0.01)
    store.greet()
    store.check_version(0.01)
    store.client.set("ntp/job/hello", "7")
    with pytest.raises(MembershipError, match="protocol 7, this process 1"):
        store.check_version(0.01)


def test_sizes_are_limited(store, caplog):
    with pytest.raises(MembershipError, match="bytes"):
        store.put("x", "a" * MAX_MESSAGE_BYTES)
    store.client.set("ntp/job/x", "a" * (MAX_MESSAGE_BYTES + 500))
    assert store.get("x") is None and "bytes" in caplog.text
    store.append(Event(Kind.FATAL, SEAT, text="a" * 1000 + "b" * MAX_TEXT + "c" * 1000))
    text = store.event(0).text
    assert text.startswith("aaa") and text.endswith("ccc") and len(text) <= MAX_TEXT


def test_the_newest_generation_never_goes_back(store):
    assert latest_generation(store) is None
    for generation in (0, 2, 1):
        advance_latest(store, generation)
    assert latest_generation(store) == 2


def test_old_generations_are_deleted(store):
    founding = View.founding(Topology.start([1, 1]))
    event = -1
    for generation in range(20):
        for seat in founding.members:
            store.put(f"join/{generation}/{seat}", {})
            store.put(f"say/{generation}/end/{seat}", 1)
        store.client.set(f"ntp/groups/{generation}/0/key", "x")
        event = store.append(Event(Kind.OVER, SEAT, generation=generation), event + 1)
        view = View(
            generation, 1, founding.seats, joined=founding.joined, incarnations=founding.incarnations, events=event + 1
        )
        store.decide(f"view/{generation}", view.to_json())
        clean(store, view)
    keys = store.client.list_keys()
    assert len(keys) <= 16, sorted(keys)
    assert store.has(["view/19", "view/18", "ev/19"]) and not store.has(["view/17"])


def test_facts_follow_from_the_log():
    facts = Facts()
    for event in (
        Event(Kind.DEAD, SEAT, 0, text="killed"),
        None,
        Event(Kind.OVER, SEAT, 0, 4, "x"),
        Event(Kind.OVER, SEAT, 0, 3, "y"),
        Event(Kind.EXPELLED, SEAT, 1),
        Event(Kind.WAITING, SEAT, 2),
    ):
        facts.add(event)
    assert facts.read == 6 and facts.over == 4 and facts.waiting == {SEAT: 2}
    assert facts.gone == {(SEAT, 0), (SEAT, 1)} and facts.expelled == {(SEAT, 1)}


@pytest.mark.parametrize(
    "data",
    [None, [], {"kind": "dead"}, {**Event(Kind.DEAD, SEAT).to_json(), "kind": "boo"},
     {**Event(Kind.DEAD, SEAT).to_json(), "seat": "r1"}, {**Event(Kind.DEAD, SEAT).to_json(), "more": 1}],
)  # fmt: skip
def test_malformed_events_are_refused(data):
    with pytest.raises(MembershipError):
        Event.from_json(data)
