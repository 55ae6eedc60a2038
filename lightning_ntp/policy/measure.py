"""Speeds of replicas from the step times that ride in the vote, steady against noise.

A replica's step time divided by its share is its slowness. Steps are noisy, so the median of the last ones counts, and
it counts as different only where it is off by more than the noise of such a median explains, to the same side for some
steps in a row. So noise does not reshuffle, and a slow replica is known within 20 steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from statistics import median

from lightning_ntp.errors import ConfigError

GRAIN = 64
"""Speeds in use are multiples of 1/64: what is finer is noise."""
_SIGMAS = 3.5
_MEDIAN_ERROR = 1.2533 * 1.4826  # standard error of a median, from the median absolute deviation, of normal noise


class MeasuredSpeeds:
    """The speeds of all replicas, alike on all members that were given the same times.

    Args:
        expected: Speeds by degree, where nothing was measured.
        window: Steps whose median counts.
        patience: Steps in a row before a speed changes.
        tolerance: How far off, as a ratio, a measured speed may always be.

    Attributes:
        speeds: In use; the fastest replica relative to its degree has the speed of its degree.
    """

    def __init__(
        self, expected: Sequence[Fraction], *, window: int = 10, patience: int = 6, tolerance: float = 0.05
    ) -> None:
        if window < 1 or patience < 1 or not 0 < tolerance < 1:
            raise ConfigError(
                f"window={window}, patience={patience}, tolerance={tolerance}: give at least 1 step each, and a "
                "tolerance between 0 and 1"
            )
        self._window, self._patience, self._tolerance = window, patience, tolerance
        self.expect(expected)

    def expect(self, expected: Sequence[Fraction]) -> None:
        """Begin anew, as degrees or boosts have changed: what was measured says nothing about them."""
        self._expected = tuple(expected)
        self.speeds = self._expected
        self._times: list[deque[float]] = [deque(maxlen=self._window) for _ in expected]
        self._away = [0] * len(self._expected)

    def add(self, seconds: Sequence[float], shares: Sequence[int]) -> bool:
        """One step's compute times, one for each replica; 0 for one that took no sample.

        Returns:
            Whether speeds have changed.
        """
        for times, spent, share in zip(self._times, seconds, shares, strict=True):
            if share and spent > 0:
                times.append(spent / share)
        if any(len(times) < self._window for times, share in zip(self._times, shares, strict=True) if share):
            return False
        return self._settle()

    def _settle(self) -> bool:
        ratios = [
            None if not times or not expected else 1 / (median(times) * float(expected))
            for times, expected in zip(self._times, self._expected, strict=True)
        ]
        best = max((ratio for ratio in ratios if ratio is not None), default=None)
        if best is None:
            return False
        tolerance, changed = max(self._tolerance, _SIGMAS * self._noise()), False
        for replica, (ratio, expected) in enumerate(zip(ratios, self._expected, strict=True)):
            if ratio is not None:
                changed |= self._follow(replica, float(expected) * ratio / best, tolerance)
        return changed

    def _noise(self) -> float:
        """Standard error of the ratio of two replicas' medians, from the scatter of all that was measured."""
        scatter = [abs(time / median(times) - 1) for times in self._times if times for time in times]
        return math.sqrt(2 / self._window) * _MEDIAN_ERROR * median(scatter)

    def _follow(self, replica: int, measured: float, tolerance: float) -> bool:
        off = measured / float(self.speeds[replica]) - 1
        if abs(off) <= tolerance:
            self._away[replica] = 0
            return False
        side = 1 if off > 0 else -1
        away = self._away[replica]
        self._away[replica] = away + side if away * side >= 0 else side
        if abs(self._away[replica]) < self._patience:
            return False
        self._away[replica] = 0
        fastest = self._expected[replica]
        grains = max(1, round(measured * GRAIN))
        # Back at its degree's speed it has exactly that, or equal replicas would get unequal shares for ever.
        is_back = measured >= float(fastest) * (1 - tolerance / 2)
        self.speeds = tuple(
            (fastest if is_back else Fraction(grains, GRAIN)) if number == replica else speed
            for number, speed in enumerate(self.speeds)
        )
        return True
