"""How much power a reduced replica's survivors need to keep the pace.

Speed goes with the power limit as ``speed = power ** exponent``. The prior of the exponent, 0.65, fits the figures of
the NTP paper (arXiv 2504.06095): 1.069 at 1.1x and 1.122 at 1.2x power. It is refitted from step times.

    >>> round(power_for(8 / 7), 2), round(power_for(32 / 30), 2), round(power_for(32 / 28), 2)
    (1.23, 1.1, 1.23)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_ntp.errors import ConfigError

EXPONENT = 0.65
MOST_POWER = 1.3
"""Of the default limit: what a rack is built for, by the paper."""


def power_for(speed: float, exponent: float = EXPONENT) -> float:
    """Power, as a ratio, that makes a GPU ``speed`` times as fast.

    Raises:
        ConfigError: for a speed that is not above 0, or an exponent outside (0, 1].
    """
    if not speed > 0 or not 0 < exponent <= 1:
        raise ConfigError(f"speed={speed}, exponent={exponent}: give a speed above 0 and an exponent in (0, 1]")
    return speed ** (1 / exponent)


def speed_at(power: float, exponent: float = EXPONENT) -> float:
    """How many times as fast a GPU is at ``power`` times its power."""
    return power**exponent


@dataclass(frozen=True)
class Boost:
    """The power of one replica's members.

    Attributes:
        power: Limit to set, as a ratio to the limit found.
        speed: What it brings, as a ratio.
        is_enough: Whether the replica keeps the nominal pace with it; else shares do the rest.
    """

    power: float = 1.0
    speed: float = 1.0
    is_enough: bool = False


def boost_for(degree: int, nominal_degree: int, headroom: float, exponent: float = EXPONENT) -> Boost:
    """The boost of a replica at ``degree``: no more than it needs, and no more than there is.

    Args:
        degree: Its live members.
        nominal_degree: Members without failures.
        headroom: Most power that its boards and its energy domain allow, as a ratio to the limit found; 1 for none.
        exponent: Of speed over power.
    """
    needed = nominal_degree / degree
    wanted = power_for(needed, exponent)
    power = max(1.0, min(wanted, headroom, MOST_POWER))
    return Boost(power, speed_at(power, exponent), math.isclose(power, wanted) or power > wanted)


def refit(power: float, speed: float, exponent: float = EXPONENT, weight: float = 0.5) -> float:
    """The exponent after a measurement: ``speed`` was seen at ``power`` times the power.

    Half way to what was seen, within 0.05 and 1: a step's time is noisy, and a replica that is bound by memory or by
    communication gains nothing from power.

    Args:
        power: Ratio of the limits.
        speed: Ratio of the speeds that were seen.
        exponent: So far.
        weight: Of the measurement.
    """
    if power <= 1.0 or speed <= 0.0:
        return exponent
    seen = math.log(speed) / math.log(power)
    return min(1.0, max(0.05, (1 - weight) * exponent + weight * seen))
