"""D7: the ledger against values computed by hand, and that no second is lost or counted twice."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.errors import ConfigError
from lightning_ntp.goodput import BADPUT, BUCKETS, Ledger, Tally


def test_two_failures_a_rejoin_and_a_restart():
    """Eight members; one dies in step 2, one between steps, one comes back, and all start again from step 3's file."""
    ledger = Ledger(100.0)
    ledger.begin_step(110.0)  # 10 s of start
    ledger.commit_step(112.0, 32)
    ledger.enter("data_loading", 112.0)
    ledger.begin_step(113.0)  # 1 s of data
    ledger.commit_step(115.0, 32)
    ledger.begin_step(115.0)
    ledger.fail(118.0, detection_s=0.5)  # it died at 117.5: 2.5 s of work are lost
    ledger.begin_step(119.0)  # 1 s of reconfiguration, 1.5 s to recover
    ledger.commit_step(121.0, 32, 7 / 8)
    ledger.enter("checkpoint_save", 121.0)
    ledger.enter("other", 125.0)
    saved = json.loads(json.dumps(ledger.tally.to_json()))
    ledger.fail(126.0)  # between steps: nothing is lost
    ledger.enter("other", 126.5)
    ledger.begin_step(127.0)
    ledger.commit_step(129.0, 32, 6 / 8)
    ledger.enter("reconfiguration", 129.0)  # one comes back
    ledger.begin_step(129.5)
    ledger.commit_step(131.5, 32, 7 / 8)
    expected = {
        "productive": 2 + 2 + 2 * 7 / 8 + 2 * 6 / 8 + 2 * 7 / 8,
        "initialization": 10.0,
        "data_loading": 1.0,
        "checkpoint_save": 4.0,
        "checkpoint_restore": 0.0,
        "detection": 0.5,
        "reconfiguration": 1.0 + 0.5 + 0.5,
        "wasted_progress": 2.5,
        "reduced_capacity": 2 / 8 + 2 * 2 / 8 + 2 / 8,
        "other": 1.0 + 0.5,
    }
    assert ledger.seconds == pytest.approx(expected) and ledger.tally.wall_s == pytest.approx(31.5)
    assert (ledger.tally.samples, ledger.tally.steps, ledger.tally.disruptions) == (160, 5, 2)
    metrics = ledger.tally.metrics()
    assert metrics["goodput"] == pytest.approx(9.0 / 31.5)
    assert metrics["time_to_recover"] == pytest.approx((1.5 + 1.0) / 2)
    assert metrics["samples_goodput"] == pytest.approx(160 / 31.5)

    again = Ledger(0.0, Tally.from_json(saved))  # another process, another clock
    again.enter("checkpoint_restore", 5.0)
    again.begin_step(7.0)
    again.commit_step(9.0, 32)
    assert again.seconds["initialization"] == 15.0 and again.seconds["checkpoint_restore"] == 2.0
    assert again.tally.steps == 4 and again.tally.wall_s == pytest.approx(25.0 + 9.0)


def test_a_step_that_is_committed_through_a_failure():
    ledger = Ledger(0.0)
    ledger.begin_step(0.0)
    ledger.fail(4.0, detection_s=1.0)
    ledger.commit_step(5.0, 8)
    assert ledger.seconds["productive"] == 3.0 and ledger.seconds["detection"] == 1.0
    assert ledger.seconds["reconfiguration"] == 1.0 and ledger.seconds["wasted_progress"] == 0.0


def test_a_restart_takes_back_what_came_after_the_checkpoint():
    ledger = Ledger(0.0)
    for step in range(3):
        ledger.begin_step(step * 2.0)
        ledger.commit_step(step * 2.0 + 2.0, 10)
    ledger.roll_back(2, 20, 4.0)
    assert (ledger.tally.steps, ledger.tally.samples) == (1, 10)
    assert ledger.seconds["productive"] == 2.0 and ledger.seconds["wasted_progress"] == 4.0
    with pytest.raises(ConfigError, match="more than was booked"):
        ledger.roll_back(2, 0, 0.0)


MOVES = st.one_of(
    st.tuples(st.just("enter"), st.sampled_from(BUCKETS)),
    st.tuples(st.sampled_from(["begin_step", "lose_step"]), st.none()),
    st.tuples(st.just("fail"), st.floats(0, 5)),
    st.tuples(st.just("commit_step"), st.floats(0.1, 1.0)),
)


@given(st.lists(st.tuples(st.floats(0, 10), MOVES), max_size=40))
def test_every_second_is_in_one_bucket(moves):
    now, ledger = 0.0, Ledger(0.0)
    for spent, (move, argument) in moves:
        now += spent
        if move == "commit_step":
            ledger.begin_step(now)
            now += spent
            ledger.commit_step(now, 1, argument)
        elif argument is None:
            getattr(ledger, move)(now)
        elif move == "enter":
            ledger.enter(argument, now)
        else:
            ledger.fail(now, argument)
    ledger.lose_step(now)
    assert ledger.tally.wall_s == pytest.approx(now, abs=1e-6)
    assert all(seconds >= -1e-9 for seconds in ledger.seconds.values())


def test_tallies_add_up_and_survive_json():
    one, other = Ledger(0.0), Ledger(0.0)
    for ledger in (one, other):
        ledger.begin_step(3.0)
        ledger.commit_step(5.0, 8)
    total = Tally.from_json(one.tally.to_json())
    total.add(other.tally)
    assert total.wall_s == 10.0 and total.samples == 16 and total.metrics()["goodput"] == 0.4
    assert set(total.metrics()) == {"goodput", "samples_goodput", "disruptions", *(f"badput/{b}" for b in BADPUT)}
    assert Tally.from_json({**total.to_json(), "seconds": {"from_the_future": 2.0}}).seconds["other"] == 2.0
    for bad in ({}, {"seconds": 1, "samples": 0, "steps": 0, "disruptions": 0, "recovery_s": 0}):
        with pytest.raises(ConfigError, match="no tally"):
            Tally.from_json(bad)


def test_bad_calls():
    ledger = Ledger(1.0)
    assert Tally().metrics() == {}
    with pytest.raises(ConfigError, match="bucket='lunch'"):
        ledger.enter("lunch", 2.0)
    with pytest.raises(ConfigError, match="does not go back"):
        ledger.enter("other", 0.5)
    with pytest.raises(ConfigError, match="commit a step"):
        ledger.commit_step(2.0, 1)
