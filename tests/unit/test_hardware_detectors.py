"""Detectors without a driver: a user's check, and seats that have become slow."""

from __future__ import annotations

import doctest
import random
import threading

import pytest

from lightning_ntp.errors import ConfigError
from lightning_ntp.hardware import detectors, xids
from lightning_ntp.hardware.detectors import DetectorLoop, StragglerDetector, as_detector
from lightning_ntp.hardware.findings import Finding, Once, Verdict, worst
from lightning_ntp.topology import Seat

SEATS = tuple(Seat(replica, index) for replica in range(2) for index in range(4))
SLOW = Seat(1, 2)


def steps(
    detector: StragglerDetector, rng: random.Random, count: int, noise: float, factors: dict[Seat, float]
) -> list[tuple[int, Finding]]:
    """(step, finding) of ``count`` steps of 0.4 s with log-normal noise."""
    found = []
    for step in range(count):
        seconds = {seat: 0.4 * factors.get(seat, 1.0) * rng.lognormvariate(0, noise) for seat in SEATS}
        found += [(step, finding) for finding in detector.add(seconds)]
    return found


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.1, 0.2])
@pytest.mark.parametrize("seed", range(10))
def test_noise_names_nobody(seed, noise):
    detector = StragglerDetector()
    assert steps(detector, random.Random(seed), 200, noise, {}) == []
    assert detector.slow_seats == {}


@pytest.mark.parametrize(("factor", "noise"), [(1.3, 0.03), (2.0, 0.1), (10.0, 0.1)])
@pytest.mark.parametrize("seed", range(10))
def test_a_slow_seat_is_named_within_20_steps_and_recovers(seed, factor, noise):
    detector, rng = StragglerDetector(), random.Random(seed)
    assert steps(detector, rng, 30, noise, {}) == []
    ((step, finding),) = steps(detector, rng, 100, noise, {SLOW: factor})
    assert step < 20
    assert (finding.verdict, finding.subject, finding.source) == (Verdict.DEGRADED, "r1.s2", "straggler")
    assert detector.slow_seats[SLOW] == pytest.approx(factor, rel=0.25)
    ((step, finding),) = steps(detector, rng, 100, noise, {})
    assert step < 20
    assert (finding.verdict, finding.is_recovery, finding.subject) == (Verdict.NOTE, True, "r1.s2")
    assert detector.slow_seats == {}


@pytest.mark.parametrize("seed", range(10))
def test_at_the_limit_it_does_not_flap(seed):
    detector, rng = StragglerDetector(slow=1.15), random.Random(seed)
    assert len(steps(detector, rng, 200, 0.03, {SLOW: 1.15})) <= 1
    assert set(detector.slow_seats) <= {SLOW}


@pytest.mark.parametrize("noise", [0.03, 0.1])
@pytest.mark.parametrize("seed", range(10))
def test_of_two_seats_noise_names_neither(seed, noise):
    detector, rng = StragglerDetector(), random.Random(seed)
    found = [detector.add({seat: rng.lognormvariate(0, noise) for seat in SEATS[:2]}) for _ in range(200)]
    assert not any(found)


def test_a_short_stall_is_no_straggler():
    detector, rng = StragglerDetector(), random.Random(5)
    for _ in range(10):
        assert steps(detector, rng, 4, 0.03, {SLOW: 8.0}) == []
        assert steps(detector, rng, 20, 0.03, {}) == []


def test_two_seats_slow_at_once_are_both_named():
    detector, rng = StragglerDetector(), random.Random(6)
    steps(detector, rng, 20, 0.03, {})
    found = steps(detector, rng, 20, 0.03, {SLOW: 1.5, SEATS[0]: 1.5})
    assert sorted(finding.subject for _, finding in found) == ["r0.s0", "r1.s2"]


def test_seats_come_and_go():
    detector = StragglerDetector(window=2, patience=1)
    for _ in range(3):
        found = detector.add({"a": 1.0, "b": 1.0, "c": 3.0})
    assert detector.slow_seats == {"c": 3.0} and found == ()
    assert detector.add({"a": 1.0, "b": 1.0}) == () and detector.slow_seats == {}
    assert detector.add({"a": 1.0, "b": 1.0, "c": 9.0}) == (), "a joiner's window has to fill"
    assert detector.add({"a": 1.0, "b": 1.0, "c": 0.0}) == (), "who takes no sample is not measured"
    assert [finding.subject for finding in detector.add({"a": 1.0, "b": 1.0, "c": 9.0})] == ["c"]
    alone = StragglerDetector(window=1, patience=1)
    assert alone.add({"a": 9.0}) == () and alone.add({}) == ()


def test_bad_arguments():
    for arguments in ({"slow": 1.0}, {"window": 0}, {"patience": 0}, {"sigmas": -1}):
        ((name, value),) = arguments.items()
        with pytest.raises(ConfigError, match=f"{name}={value}"):
            StragglerDetector(**arguments)


def test_checks_become_detectors():
    own = Finding(Verdict.DEGRADED, "fan", "a fan is slow")

    def thermometer() -> bool:
        return False

    class HealthCheck:  # the shape of NVIDIA's resiliency extension
        def __call__(self) -> bool:
            return False

    assert as_detector(lambda: True)() is None and as_detector(lambda: None)() is None
    assert as_detector(lambda: own)() is own
    assert as_detector(thermometer)() == Finding(
        Verdict.LEAVE, "thermometer", "thermometer says that the device is not healthy"
    )
    assert as_detector(HealthCheck(), Verdict.LOST)().source == "HealthCheck"
    with pytest.raises(ConfigError, match="the detector thermometer has returned 'hot'"):
        as_detector(lambda: "hot", name="thermometer")()


def test_a_loop_hands_on_each_finding_once_and_survives_a_detector_that_fails():
    answers = iter([True, False, False, True])
    found, done = [], threading.Event()

    def check() -> bool:
        answer = next(answers, None)
        if answer is None:
            done.set()
        return answer is not False

    def broken() -> bool:
        raise OSError("no such file")

    loop = DetectorLoop([broken, check], found.append, period_s=0.01)
    loop.start()
    assert done.wait(5.0)
    loop.stop()
    assert [(finding.verdict.value, finding.source, finding.is_recovery) for finding in found] == [
        ("note", "broken", False),
        ("leave", "check", False),
        ("note", "check", True),
    ]
    assert found[0].text == "the detector broken fails: OSError: no such file"
    assert all(finding.at_s is not None for finding in found)


def test_findings_are_told_once_and_over_when_their_source_is_silent():
    told: list[Finding] = []
    once = Once(told.append)
    one, two = (Finding(Verdict.DEGRADED, "nvlink", f"NVLink {link} is down") for link in (1, 2))
    once.tell(one)
    once.tell(Finding(Verdict.DEGRADED, "nvlink", "NVLink 1 is down", at_s=9.0))
    assert told == [one], "the time makes no difference"
    told.clear()
    for current in ([one], [one, two], [two], [], [], [two]):
        once.settle(current, 1.0)
    assert [finding.text for finding in told] == [
        "NVLink 1 is down",
        "NVLink 2 is down",
        "over: NVLink 2 is down",
        "NVLink 2 is down",
    ]


def test_the_worst_verdict():
    findings = [Finding(verdict, "a", "b") for verdict in reversed(Verdict)]
    assert worst(findings) is Verdict.LOST and worst(findings[:2]) is Verdict.DEGRADED and worst([]) is None


@pytest.mark.parametrize("module", [detectors, xids])
def test_the_examples_in_the_docstrings(module):
    outcome = doctest.testmod(module)
    assert outcome.attempted and not outcome.failed
