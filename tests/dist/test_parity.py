"""The gate: fp64 parity with a dense single-process run, per step (DESIGN section 15), on bare gloo without a Trainer."""

from __future__ import annotations

import pytest

from tests.dist.bare import assert_copies_equal, history_of, train_rank
from tests.support.cases import COVERING, FULL, Case
from tests.support.reference import assert_parity, train_dense

STEPS = 10


def check(workers, case: Case) -> None:
    batches = case.global_batches(STEPS)
    runs = workers.run(train_rank, case.num_ranks, case, batches, timeout_s=120)
    dense = train_dense(case.model, batches, optimizer=case.optimizer, padded=case.padded)
    for replica in range(len(case.degrees)):
        assert_parity(history_of(runs, replica), dense)
    assert_copies_equal(runs)


@pytest.mark.parametrize("case", COVERING, ids=lambda case: case.id)
def test_parity(workers, case):
    check(workers, case)


@pytest.mark.parity
@pytest.mark.parametrize("case", FULL, ids=lambda case: case.id)
def test_parity_table(workers, case):
    check(workers, case)
