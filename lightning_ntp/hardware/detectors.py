"""Detectors that need no driver: a user's own check, and step times that name a seat which has become slow.

A detector is a callable without arguments. It returns a :class:`Finding`, or ``None`` if all is well. Checks of the
form ``() -> bool``, as in NVIDIA's resiliency extension, fit through :func:`as_detector`:

    >>> detector = as_detector(lambda: False, name="burn-in")
    >>> print(detector())
    leave: burn-in says that the device is not healthy
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Protocol

from lightning_ntp.errors import ConfigError
from lightning_ntp.hardware.findings import Finding, Once, Verdict


class Detector(Protocol):
    """Looks at something of the member's own; see the module's docstring."""

    def __call__(self) -> Finding | None: ...


def as_detector(
    check: Callable[[], Finding | bool | None], verdict: Verdict = Verdict.LEAVE, name: str = ""
) -> Detector:
    """A detector from a check that may return a bool.

    Args:
        check: ``True`` or ``None`` if all is well; ``False`` or a finding if not.
        verdict: Of ``False``.
        name: What to call the check; by default the function's name.
    """
    name = name or getattr(check, "__name__", type(check).__name__)

    def detect() -> Finding | None:
        answer = check()
        if answer is None or isinstance(answer, Finding):
            return answer
        if isinstance(answer, bool):
            return None if answer else Finding(verdict, name, f"{name} says that the device is not healthy")
        raise ConfigError(f"the detector {name} has returned {answer!r}: return a Finding, a bool or None")

    detect.__name__ = name
    return detect


class DetectorLoop:
    """Asks detectors in turn, in a daemon thread of its own: one that hangs holds up the other detectors, no more.

    Args:
        detectors: Also checks that return a bool.
        on_finding: Gets each finding once, in the loop's thread. One that no longer holds is followed by a note.
        period_s: Time between two rounds.
    """

    def __init__(
        self,
        detectors: Sequence[Callable[[], Finding | bool | None]],
        on_finding: Callable[[Finding], object],
        period_s: float = 1.0,
    ) -> None:
        self._detectors = [as_detector(detector) for detector in detectors]
        self._once, self._period_s = Once(on_finding), period_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ntp-detectors", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the thread; one that is stuck in a detector is left to itself."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopped.is_set():
            findings = [finding for detector in self._detectors if (finding := _ask(detector)) is not None]
            self._once.settle(findings, time.monotonic())
            self._stopped.wait(self._period_s)


def _ask(detector: Detector) -> Finding | None:
    try:
        return detector()
    except Exception as error:  # a user's: that it fails says nothing of the device
        name = getattr(detector, "__name__", type(detector).__name__)
        return Finding(Verdict.NOTE, name, f"the detector {name} fails: {type(error).__name__}: {error}")


class StragglerDetector:
    """Names seats whose steps take longer than the others'.

    A seat's time is the median of its last ``window`` steps, and is set against the median of the other seats' times.
    Steps are noisy: a seat counts as slow only if it is slower by ``slow`` and by more than the noise explains, for
    ``patience`` steps in a row; and as recovered only below the middle of that way, for as many.

    Args:
        slow: Ratio to the others at which a seat is slow.
        window: Steps whose median counts.
        patience: Steps in a row before anything is said.
        sigmas: What is explained by noise: standard errors of such a median.

    Attributes:
        slow_seats: Who is slow, and by which ratio at the last look.

    Raises:
        ConfigError: for arguments below their least.
    """

    def __init__(self, *, slow: float = 1.15, window: int = 9, patience: int = 5, sigmas: float = 4.0) -> None:
        if slow <= 1 or window < 1 or patience < 1 or sigmas < 0:
            raise ConfigError(
                f"slow={slow}, window={window}, patience={patience}, sigmas={sigmas}: give a ratio above 1, at least 1 "
                "step each, and sigmas of at least 0"
            )
        self._slow, self._window, self._patience, self._sigmas = slow, window, patience, sigmas
        self._times: dict[object, deque[float]] = {}
        self._away: dict[object, int] = {}
        self.slow_seats: dict[object, float] = {}

    def add(self, seconds: Mapping[object, float]) -> tuple[Finding, ...]:
        """One step.

        Args:
            seconds: For each live seat the time that it computed, without that in which it waited for others, and
                for equal work: divided by its samples and units where these differ. 0 for a seat that took no sample.
                Seats that are not given are forgotten.

        Returns:
            What has changed: a degraded seat, or a note that one has recovered.
        """
        for table in (self._times, self._away, self.slow_seats):
            for seat in table.keys() - seconds.keys():
                del table[seat]
        for seat, spent in seconds.items():
            if spent > 0:
                self._times.setdefault(seat, deque(maxlen=self._window)).append(spent)
        known = {seat: times for seat, times in self._times.items() if len(times) == self._window}
        if len(known) < 2:
            return ()
        medians = {seat: median(times) for seat, times in known.items()}
        noise = self._noise(known, medians)
        changes = [self._follow(seat, medians, noise) for seat in sorted(known, key=str)]
        return tuple(change for change in changes if change is not None)

    def _noise(self, known: Mapping[object, Sequence[float]], medians: Mapping[object, float]) -> float:
        """Standard error of a window's median, as a ratio: 1.2533 / sqrt(n) times sigma, which is 1.4826 MADs."""
        scatter = [abs(spent / medians[seat] - 1) for seat, times in known.items() for spent in times]
        return 1.2533 * 1.4826 * median(scatter) / math.sqrt(self._window)

    def _follow(self, seat: object, medians: Mapping[object, float], noise: float) -> Finding | None:
        others = [spent for other, spent in medians.items() if other != seat]
        ratio = medians[seat] / median(others)
        noise *= math.sqrt(1 + math.pi / 2 / len(others))  # the others' median has an error, too
        limit = max(self._slow, 1 + self._sigmas * noise)
        was_slow = seat in self.slow_seats
        is_turning = ratio < (1 + limit) / 2 if was_slow else ratio >= limit
        self._away[seat] = self._away.get(seat, 0) + 1 if is_turning else 0
        if self._away[seat] >= self._patience:
            self._away[seat] = 0
            if was_slow:
                del self.slow_seats[seat]
                return Finding(Verdict.NOTE, "straggler", "as fast as the others again", str(seat), is_recovery=True)
            self.slow_seats[seat] = ratio
            return Finding(Verdict.DEGRADED, "straggler", f"{ratio:.2f} times as slow as the others", str(seat))
        if was_slow:
            self.slow_seats[seat] = ratio
        return None
