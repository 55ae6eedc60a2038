"""D5: shares, boosts and retirements that the policy decides, against brute force and the figures of the design."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ntp.errors import ConfigError
from lightning_ntp.policy.boost import EXPONENT, boost_for, power_for, refit, speed_at
from lightning_ntp.policy.decision import Situation, decide
from lightning_ntp.policy.memory import Memory
from lightning_ntp.policy.pace import carried_deal, fastest_deal, pace_of, speeds_by_degree, step_time

SPEED = st.fractions(Fraction(1, 16), 1, max_denominator=16)


def brute_force(n: int, speeds: tuple[Fraction, ...]) -> Fraction:
    """The shortest time in which ``n`` samples can be done: every share of the first replica is tried."""

    @cache
    def shortest(left: int, replica: int) -> Fraction:
        if replica == len(speeds) - 1:
            return left / speeds[replica]
        return min(max(share / speeds[replica], shortest(left - share, replica + 1)) for share in range(left + 1))

    return shortest(n, 0)


@settings(max_examples=40)
@given(st.integers(1, 64), st.lists(SPEED, min_size=1, max_size=4).map(tuple))
def test_fastest_deal_is_optimal(n, speeds):
    shares = fastest_deal(n, speeds)
    assert sum(shares) == n
    assert max(share / speed for share, speed in zip(shares, speeds, strict=True)) == brute_force(n, speeds)


def test_dead_replicas_take_nothing_and_bad_input_is_refused():
    assert fastest_deal(10, (Fraction(1), Fraction(0), Fraction(1))) == (5, 0, 5)
    assert carried_deal(8, (Fraction(1), Fraction(0), Fraction(1, 100))) == (8, 0, 1)
    for n, speeds in ((4, (Fraction(0),)), (-1, (Fraction(1),)), (4, (Fraction(-1), Fraction(2)))):
        with pytest.raises(ConfigError, match="cannot deal"):
            fastest_deal(n, speeds)
    with pytest.raises(ConfigError, match="speed 0"):
        step_time((1, 1), (Fraction(1), Fraction(0)), 1)


# The size of the global batch


def test_many_replicas_with_few_samples_shrink():
    """64 replicas x 8 samples, one at 7 of 8: one moved sample makes some replica's share 9 of 8."""
    situation = Situation((*[8] * 63, 7), 8, 8)
    constant, shrink = (pace_of(mode, 8, speeds_by_degree(situation.degrees, 8)) for mode in ("constant", "shrink"))
    assert (sum(constant.shares), constant.cost) == (512, Fraction(1, 8))
    assert (sum(shrink.shares), shrink.time) == (511, 1) and float(shrink.cost) == pytest.approx(0.002, abs=1e-4)
    decision = decide(situation)
    assert decision.mode == "shrink" and decision.shares == (*[8] * 63, 7)
    assert any("auto takes shrink" in reason and "+12.5% a sample" in reason for reason in decision.reasons)


def test_few_replicas_with_many_samples_keep_the_global_batch():
    """2 x 64 samples, one at 7 of 8."""
    decision = decide(Situation((8, 7), 8, 64))
    constant, shrink = decision.compared
    assert constant.shares == (68, 60) and float(constant.cost) == pytest.approx(0.0714, abs=1e-4)
    assert shrink.shares == (64, 56) and float(shrink.cost) == pytest.approx(0.0667, abs=1e-4)
    assert decision.mode == "constant" and decision.shares == (68, 60) and decision.cost == constant.cost


def test_what_the_user_says_counts():
    assert decide(Situation((*[8] * 63, 7), 8, 8, global_batch="constant")).mode == "constant"
    assert decide(Situation((8, 7), 8, 64, global_batch="shrink")).shares == (64, 56)


# Boosts


@pytest.mark.parametrize(("degree", "nominal", "power"), [(7, 8, 1.23), (30, 32, 1.10), (28, 32, 1.23)])
def test_boosts_of_the_design(degree, nominal, power):
    boost = boost_for(degree, nominal, headroom=1.3)
    assert round(boost.power, 2) == power and boost.is_enough
    assert boost.speed == pytest.approx(nominal / degree)


def test_a_boost_that_is_not_enough_leaves_the_rest_to_the_shares():
    assert round(power_for(8 / 6), 2) == 1.56
    boost = boost_for(6, 8, headroom=2.0)
    assert boost.power == 1.3 and not boost.is_enough and boost.speed == pytest.approx(1.3**0.65)
    decision = decide(Situation((8, 6), 8, 64, global_batch="constant", headroom=(2.0, 2.0)))
    assert decision.boosts[0].power == 1.0 and decision.boosts[1].power == 1.3
    speed = 0.75 * 1.3**0.65
    assert sum(decision.shares) == 128 and decision.shares[1] / 128 == pytest.approx(speed / (1 + speed), abs=0.005)


def test_a_board_without_headroom_is_left_alone():
    """Stock H100 SXM: max is the default limit."""
    decision = decide(Situation((8, 7), 8, 64, headroom=(1.0, 1.0)))
    assert [boost.power for boost in decision.boosts] == [1.0, 1.0] and decision.shares == (68, 60)
    full = decide(Situation((8, 7), 8, 64, headroom=(1.3, 1.3)))
    assert full.shares == (64, 64) and float(full.cost) == pytest.approx(0.0, abs=1e-3)


def test_the_exponent_is_refitted():
    assert refit(1.2, speed_at(1.2, 0.4)) == pytest.approx((EXPONENT + 0.4) / 2)
    assert refit(1.2, 0.9) == pytest.approx((EXPONENT + 0.0) / 2, abs=0.3)
    assert refit(1.0, 1.5) == EXPONENT and refit(1.2, 5.0, weight=1.0) == 1.0 and refit(1.2, 1.0, weight=1.0) == 0.05
    with pytest.raises(ConfigError, match="exponent=0"):
        power_for(1.1, 0)


# Who leaves


def test_below_the_lowest_degree_and_without_memory():
    decision = decide(Situation((8, 5), 8, 8, lowest_degree=6))
    assert decision.retirements == (1,) and decision.degrees == (8, 0) and decision.shares[1] == 0
    assert "below 6, the lowest degree" in decision.reasons[0]
    assert decide(Situation((5, 4), 8, 8, lowest_degree=6)).retirements == (), "if all are, they stay"


def test_a_thin_replica_that_slows_the_sync_retires():
    """Half of the step is sync: at degree 2 of 8 it takes four times as long, for all."""
    thin = Situation((8, 8, 8, 2), 8, 8, global_batch="shrink", sync=Fraction(1, 2))
    decision = decide(thin)
    assert decision.retirements == (3,) and "replica 3 at degree 2 retires" in decision.reasons[0]
    hidden = Situation((8, 8, 8, 2), 8, 8, global_batch="shrink", sync=Fraction(0))
    assert decide(hidden).retirements == (), "where the sync is hidden its samples are worth it"


def test_memory():
    memory = Memory(state=60, activations=4, capacity=100, replicated=4)
    assert memory.needed(8, 8, 8) == 60 + 8 * 4
    assert memory.needed(7, 8, 1) == 4 + 64 + 5
    assert [memory.largest_micro_batch(degree, 8, 8) for degree in (8, 7, 5, 4)] == [8, 4, 0, 0]
    decision = decide(Situation((8, 7), 8, 64, micro_batch=8, memory=memory))
    assert decision.micro_batches == (8, 4)
    decision = decide(Situation((8, 5), 8, 64, micro_batch=8, memory=memory))
    assert decision.retirements == (1,) and "no memory for a single sample" in decision.reasons[0]
    with pytest.raises(ConfigError, match="no replica has the members and the memory"):
        decide(Situation((4, 4), 8, 64, memory=memory))
    with pytest.raises(ConfigError, match="replicated part"):
        Memory(state=1, activations=1, capacity=1, replicated=2)


def test_bad_situations():
    for degrees in ((0, 0), (9, 8), (-1, 8)):
        with pytest.raises(ConfigError, match="degrees="):
            Situation(degrees, 8, 8)
    with pytest.raises(ConfigError, match="headroom="):
        Situation((8, 8), 8, 8, headroom=(1.0,))


@given(st.lists(st.integers(0, 8), min_size=1, max_size=4).filter(any), st.integers(1, 64))
def test_every_decision_holds_together(degrees, per_replica):
    decision = decide(Situation(tuple(degrees), 8, per_replica, headroom=(1.3,) * len(degrees)))
    assert sum(decision.shares) <= per_replica * len(degrees) and any(decision.shares)
    assert all(degree or not share for degree, share in zip(decision.degrees, decision.shares, strict=True))
    assert decision.mode != "constant" or sum(decision.shares) == per_replica * len(degrees)
