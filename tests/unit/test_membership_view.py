"""Views: the slot rule, the leader, and reading what others wrote."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.errors import MembershipError
from lightning_ntp.membership.view import View, reseat
from lightning_ntp.topology import Seat, Topology

START = Topology.start([4, 4]).seats


def seats(text: str) -> tuple[tuple[Seat, ...], ...]:
    """``"00 01 | 10"`` -> seats of two replicas."""
    return tuple(tuple(Seat(int(name[0]), int(name[1])) for name in part.split()) for part in text.split("|"))


@pytest.mark.parametrize(
    ("gone", "expected"),
    [
        ("", "00 01 02 03 | 10 11 12 13"),
        ("03", "00 01 02 | 10 11 12 13"),
        ("01", "00 03 02 | 10 11 12 13"),
        ("00 01", "02 03 | 10 11 12 13"),
        ("01 03", "00 02 | 10 11 12 13"),
        ("00 01 02 12", "03 | 10 11 13"),
        ("00 01 02 03", "10 11 12 13"),
    ],
)
def test_who_sits_above_the_new_degree_fills_the_dead_slots(gone, expected):
    dead = {seat for part in seats(gone) for seat in part}
    assert reseat(START, dead) == seats(expected)


def test_a_joiner_gets_the_last_slot():
    assert reseat(seats("00 03 02 | 10 11"), (), [Seat(0, 1)]) == seats("00 03 02 01 | 10 11")
    assert reseat(seats("10 11"), (), [Seat(0, 2), Seat(0, 3)]) == seats("02 03 | 10 11")  # a replica comes back


@given(st.integers(1, 8), st.data())
def test_only_those_above_the_new_degree_move(degree, data):
    replica = tuple(data.draw(st.permutations([Seat(0, index) for index in range(degree)])))
    gone = data.draw(st.sets(st.sampled_from(replica)))
    after = reseat((replica,), gone)
    survivors = [seat for seat in replica if seat not in gone]
    if not survivors:
        assert after == ()
        return
    (slots,) = after
    assert sorted(slots) == sorted(survivors)
    assert all(slots[slot] == seat for slot, seat in enumerate(replica[: len(slots)]) if seat not in gone)
    movers = [seat for slot, seat in enumerate(slots) if replica[slot] != seat]
    assert movers == [seat for seat in replica[len(slots) :] if seat not in gone]  # in ascending order


def sample_view(**changes) -> View:
    members = [seat for replica in START for seat in replica]
    values = dict(
        generation=3,
        nominal_degree=4,
        seats=START,
        step=7,
        joined=dict.fromkeys(members, 0),
        incarnations=dict.fromkeys(members, 0),
        vote={"step": 7, "norm": 0.1},
        holdings={Seat(0, 0): ["tag", 1]},
        events=5,
        fruitless=1,
    )
    return View(**{**values, **changes})


def test_json_round_trip():
    view = sample_view()
    assert View.from_json(json.loads(json.dumps(view.to_json()))) == view


@pytest.mark.parametrize(
    "change",
    [
        {"generation": -1},
        {"generation": True},
        {"generation": "3"},
        {"step": -2},
        {"seats": [["r0.s0"], []]},
        {"seats": [["r0.s0", "r0.s0"]]},
        {"seats": [["r0.s0", "r1.s0"]]},
        {"seats": "r0.s0"},
        {"seats": [["r0.s00"]]},
        {"seats": [["r0.s0", "r0.s1", "r0.s2", "r0.s3", "r0.s4"]]},
        {"joined": {"r0.s0": 0}},
        {"incarnations": {"r0.s0": -1}},
        {"vote": [1]},
        {"events": 1.5},
        {"extra": 1},
    ],
)
def test_a_malformed_view_is_refused(change):
    with pytest.raises(MembershipError):
        View.from_json({**sample_view().to_json(), **change})


@pytest.mark.parametrize("name", ["generation", "seats", "vote", "fruitless"])
def test_a_missing_field_is_named(name):
    data = sample_view().to_json()
    del data[name]
    with pytest.raises(MembershipError, match=name):
        View.from_json(data)


def test_a_joiner_never_leads_while_a_veteran_lives():
    joined = {seat: 0 for replica in START for seat in replica}
    assert sample_view(joined={**joined, Seat(0, 0): 2}).leader == Seat(0, 1)
    assert sample_view(joined=dict.fromkeys(joined, 2)).leader == Seat(0, 0)


def test_the_founding_view_has_all_members_and_no_step():
    view = View.founding(Topology.start([2, 3], 4))
    assert (view.generation, view.step, view.rank(Seat(1, 0))) == (-1, -1, 2)
    with pytest.raises(MembershipError, match="r0.s2"):
        view.rank(Seat(0, 2))
