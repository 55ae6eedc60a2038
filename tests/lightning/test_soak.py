"""B4: many recoveries in one run leave nothing behind in the member that sees them all, nor in the store."""

from __future__ import annotations

import signal
from statistics import median

import pytest

from tests.lightning.live_members import Play, play
from tests.lightning.live_soak import PERIOD, STAYS, Sample, returns, soak

# What one collective that never ended costs for good: gloo's threads and the connections of its group.
THREADS_KEPT, DESCRIPTORS_KEPT = 3, 6


def run(workers, number: int, limit_s: float) -> list[Sample]:
    """Samples after 0, 1, ... recoveries; each of them is a death and a return."""
    job = Play(soak, faults=returns(number), arguments=(number,), limit_s=limit_s)
    (played,) = workers.run(play, 1, job, timeout_s=limit_s + 30)
    last = {end.name.rsplit(".", 1)[0]: end.code for end in played.ends}
    assert set(last.values()) == {0}, played.story
    assert [end.code for end in played.ends].count(-signal.SIGKILL) == number, played.codes
    samples, steps, threads = played.results[f"{STAYS}.0"]
    assert steps == PERIOD * number + 2 and played.generation == 2 * number, "each death, each return: one view"
    assert sorted(threads) == ["MainThread", "ntp-lease-beat", "ntp-lease-guard", "ntp-watcher"]
    print(*(f"{count:3} recoveries: {sample}" for count, sample in enumerate(samples)), sep="\n")
    return samples


def check_flat(samples: list[Sample], early: slice, late: slice) -> None:
    """What there was after some recoveries is all that there is after many."""

    def at(part: slice, name: str, each_kept: float = 0) -> float:
        """The median of some, without what was kept for good."""
        return median(getattr(sample, name) - each_kept * sample.collectives_kept for sample in samples[part])

    assert at(late, "threads", THREADS_KEPT) <= at(early, "threads", THREADS_KEPT)
    assert at(late, "descriptors", DESCRIPTORS_KEPT) <= at(early, "descriptors", DESCRIPTORS_KEPT)
    assert at(late, "objects") <= 1.04 * at(early, "objects")
    assert at(late, "resident_mb") <= at(early, "resident_mb") + 10.0
    # Between a change of view and the cleaning a second later there are keys of two generations more.
    assert min(sample.keys for sample in samples[late]) <= min(sample.keys for sample in samples[early]) + 5
    assert max(sample.keys for sample in samples) <= 200
    assert samples[-1].collectives_kept <= max(2, len(samples) // 10)


def test_a_few_recoveries(workers):
    """Compared from the third on: by then the member leads and sits in slot 0, with one more channel."""
    check_flat(run(workers, 6, 120.0), slice(3, 5), slice(5, 7))


@pytest.mark.slow
def test_fifty_recoveries(workers):
    check_flat(run(workers, 50, 900.0), slice(8, 13), slice(46, 51))
