"""D6: measured speeds follow a slow replica within 20 steps, and noise does not move them."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from lightning_ntp.errors import ConfigError
from lightning_ntp.policy.measure import MeasuredSpeeds
from lightning_ntp.policy.pace import fastest_deal, speeds_by_degree

FULL = (Fraction(1),) * 4


def run(speeds: MeasuredSpeeds, true: tuple[float, ...], steps: int, noise: float, rng: random.Random) -> int:
    """Steps of 32 samples on replicas of these true speeds; returns how often speeds changed."""
    changes = 0
    for _ in range(steps):
        shares = fastest_deal(32, speeds.speeds)
        seconds = [share / speed * rng.lognormvariate(0, noise) for share, speed in zip(shares, true, strict=True)]
        changes += speeds.add(seconds, shares)
    return changes


def test_a_slow_replica_loses_samples_and_gets_them_back():
    speeds, rng = MeasuredSpeeds(FULL), random.Random(1)
    assert run(speeds, (1, 1, 1, 1), 30, 0.03, rng) == 0
    run(speeds, (1, 1, 0.6, 1), 20, 0.03, rng)
    assert speeds.speeds[2] == pytest.approx(0.6, abs=0.06)
    assert fastest_deal(32, speeds.speeds)[2] <= 6
    run(speeds, (1, 1, 1, 1), 20, 0.03, rng)
    assert speeds.speeds == FULL and fastest_deal(32, speeds.speeds) == (8, 8, 8, 8)


@pytest.mark.parametrize("noise", [0.03, 0.1])
@pytest.mark.parametrize("seed", range(10))
def test_noise_does_not_reshuffle(seed, noise):
    speeds = MeasuredSpeeds(FULL)
    assert run(speeds, (1, 1, 1, 1), 200, noise, random.Random(seed)) == 0
    assert speeds.speeds == FULL


def test_degrees_are_no_slowness():
    expected = speeds_by_degree((8, 7, 8, 6), 8)
    speeds = MeasuredSpeeds(expected)
    assert run(speeds, tuple(map(float, expected)), 100, 0.03, random.Random(3)) == 0
    assert speeds.speeds == expected
    speeds.expect(FULL)
    assert speeds.speeds == FULL


def test_who_takes_no_sample_is_not_measured():
    speeds = MeasuredSpeeds((Fraction(1), Fraction(0), Fraction(1)))
    for _ in range(40):
        assert not speeds.add((1.0, 0.0, 1.0), (8, 0, 8))
    assert speeds.speeds == (1, 0, 1)


def test_bad_arguments():
    with pytest.raises(ConfigError, match="window=0"):
        MeasuredSpeeds(FULL, window=0)
