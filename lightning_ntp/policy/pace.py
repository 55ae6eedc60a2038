"""How long a step takes at given shares, and the shares that make it short.

Times are in nominal steps: a replica at nominal degree and its nominal share takes 1. A replica's speed is 1 at nominal
degree; without a measurement, a degree of 7 of 8 has speed 7/8.

    >>> fastest_deal(128, (Fraction(1), Fraction(7, 8)))
    (68, 60)
    >>> step_time((68, 60), (Fraction(1), Fraction(7, 8)), 64)
    Fraction(15, 14)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor

from lightning_ntp.errors import ConfigError
from lightning_ntp.policy.shares import ShareMode


def speeds_by_degree(degrees: Sequence[int], nominal_degree: int) -> tuple[Fraction, ...]:
    """Speeds where nothing was measured: in proportion to the degrees."""
    return tuple(Fraction(degree, nominal_degree) for degree in degrees)


def fastest_deal(n: int, speeds: Sequence[Fraction]) -> tuple[int, ...]:
    """Deal ``n`` samples so that the slowest replica is done as early as can be; ties go to the lowest index.

    Each sample goes to the replica that would be done with it first. That this is optimal is known as Jefferson's or
    D'Hondt's method of apportionment; it never gives less than the quota rounded down, so it begins there.

    Args:
        n: Samples.
        speeds: Of the replicas; 0 for one that takes nothing.

    Raises:
        ConfigError: if ``n`` or a speed is negative, or all speeds are 0.
    """
    total = sum(speeds)
    if n < 0 or total <= 0 or min(speeds) < 0:
        raise ConfigError(
            f"cannot deal n={n} samples at speeds {tuple(map(str, speeds))}: n and the speeds must be at least 0 and "
            "one speed above 0"
        )
    shares = [floor(n * speed / total) for speed in speeds]
    for _ in range(n - sum(shares)):
        first = min((i for i, speed in enumerate(speeds) if speed), key=lambda i: ((shares[i] + 1) / speeds[i], i))
        shares[first] += 1
    return tuple(shares)


def carried_deal(per_replica: int, speeds: Sequence[Fraction]) -> tuple[int, ...]:
    """What each replica can carry in the time of a nominal step: its share rounded down, at least 1 if it moves."""
    return tuple(max(floor(per_replica * min(speed, 1)), 1 if speed else 0) for speed in speeds)


def step_time(shares: Sequence[int], speeds: Sequence[Fraction], per_replica: int) -> Fraction:
    """When the slowest replica is done, in nominal steps.

    Raises:
        ConfigError: if a replica of speed 0 has samples.
    """
    if any(share and not speed for share, speed in zip(shares, speeds, strict=True)):
        raise ConfigError(f"shares={tuple(shares)}: a replica of speed 0 can take no sample")
    return max(
        (Fraction(share, per_replica) / speed for share, speed in zip(shares, speeds, strict=True) if share),
        default=Fraction(0),
    )


@dataclass(frozen=True)
class Pace:
    """What a way to size the global batch costs.

    Attributes:
        mode: The way.
        shares: Of the replicas.
        time: Of a step, in nominal steps.
        cost: How much longer a sample takes than in an undisturbed step; 0.125 is 12.5 %.
    """

    mode: ShareMode
    shares: tuple[int, ...]
    time: Fraction
    cost: Fraction

    def __str__(self) -> str:
        samples, time, cost = sum(self.shares), float(self.time), float(self.cost)
        return f"{self.mode}: {samples} samples in {time:.3f} nominal steps, {cost:+.1%} a sample"


def pace_of(mode: ShareMode, per_replica: int, speeds: Sequence[Fraction]) -> Pace:
    """The pace at ``per_replica`` samples for each replica at nominal degree.

    A sample's cost is seen against an undisturbed step of all replicas that are live.
    """
    live = sum(1 for speed in speeds if speed)
    if mode == "constant":
        shares = fastest_deal(per_replica * len(speeds), speeds)
    else:
        shares = carried_deal(per_replica, speeds)
    time = step_time(shares, speeds, per_replica)
    if mode == "shrink":
        time = max(time, Fraction(1))  # the others are not faster because a thin replica has little
    return Pace(mode, shares, time, time * per_replica * live / sum(shares) - 1)
