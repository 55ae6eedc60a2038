"""B3: random faults on the Trainer; `make chaos` runs more of the same, and longer ones."""

from __future__ import annotations

import pytest

from tests.chaos.judge import summary
from tests.chaos.plan import make_plan
from tests.chaos.run import Runner, is_good

WINDOWS = 4
# Of seed 0: a death at the start, in a recovery, of a whole replica, while loading; a hang; drains, returns, workers.
NUMBERS = (3, 4, 16, 18, 19, 26, 29, 32, 33, 37, 42, 51)


@pytest.fixture(scope="module")
def runner(workers) -> Runner:
    return Runner(workers)


@pytest.mark.parametrize("number", NUMBERS)
def test_random_faults(runner, number):
    verdict = runner.run(make_plan(0, number, WINDOWS))
    assert verdict.status in ("recovered", "lost"), verdict
    assert is_good(summary([verdict])), verdict


def test_a_plan_follows_from_its_seed():
    plans = [make_plan(3, number) for number in range(40)]
    assert plans == [make_plan(3, number) for number in range(40)]
    assert len({str(plan) for plan in plans}) > 35
    text = " ".join(map(str, plans))
    assert all(word in text for word in ("kill", "hang", "slow", "raise", "return", "loading", "drain", "workers"))
