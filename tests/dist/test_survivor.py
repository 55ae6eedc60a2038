"""B1 without a Trainer: parity with the dense run through kills at every phase of a step."""

from __future__ import annotations

import pytest
import torch

from lightning_ntp.layout import Replicated
from lightning_ntp.parallel.shards import put_local
from tests.dist.survive import Fault, MemberLog, launch
from tests.support.cases import Case
from tests.support.models import ModelConfig
from tests.support.reference import train_dense

STEPS = 8
GQA = ModelConfig(width=24, num_heads=6, num_kv_heads=3, bias=True)
CASE = Case("survive", (3, 3), GQA, shares=(6, 6))
UNEQUAL = Case("survive", (3, 2), GQA, shares=(6, 6))

# The same moments on the Trainer are in tests/chaos/table.py.
MOMENTS = [
    *[("data_parallel", 2), ("reshard", 2), ("vote", 1), ("replica_control", 2), ("step", 1)],
    *[
        pytest.param(*moment, marks=pytest.mark.slow)
        for moment in [
            *[("forward", 1), ("backward", 1), ("tensor_parallel", 3), ("tensor_parallel", 14), ("reshard", 1)],
            *[("replica_control", 1), ("leader_control", 1), ("between", 1)],
        ]
    ],
]


def check(logs: dict[str, MemberLog], codes: dict[str, int], dead: set[str], case: Case = CASE) -> None:
    assert {seat for seat, code in codes.items() if code} == dead, codes
    survivors = [log for seat, log in logs.items() if seat not in dead]
    batches = case.global_batches(STEPS)
    dense = train_dense(case.model, batches, optimizer=case.optimizer)
    for step, ids in enumerate(batches):
        by_replica = {log.seat[:2]: log for log in survivors}
        assert sorted(sum((log.samples[step] for log in by_replica.values()), [])) == ids, f"samples of step {step}"
        loss = sum(log.losses[step] for log in by_replica.values())
        assert abs(loss - dense.losses[step]) <= 1e-12 * abs(dense.losses[step]), step
        scale = max(w.abs().max() for w in dense.weights[step].values())
        for log in survivors:
            run = next(run for run in reversed(log.runs) if run.first <= step)
            assert abs(run.norms[step - run.first] - dense.norms[step]) <= 1e-12 * dense.norms[step], (log.seat, step)
            for name, layout in run.layouts.items():
                whole, local = dense.weights[step][name], run.weights[step - run.first][name]
                mine = whole.clone()
                if isinstance(layout, Replicated):
                    mine = local
                else:
                    put_local(mine, local, layout, run.degree, run.slot)
                assert (mine - whole).abs().max() <= 1e-12 * scale, (log.seat, step, name)


@pytest.mark.parametrize(("moment", "count"), MOMENTS, ids=lambda value: str(value))
def test_parity_through_a_kill(workers, moment, count):
    seat = {"leader_control": "r0.s0", "data_parallel": "r1.s0"}.get(moment, "r0.s1")
    case = UNEQUAL if moment == "reshard" else CASE
    (codes, logs), = workers.run(launch, 1, case, STEPS, [Fault(seat, 3, moment, count)], timeout_s=90)
    check(logs, codes, {seat}, case)


def test_parity_through_two_kills_and_rank_0(workers):
    faults = [Fault("r0.s0", 2, "vote"), Fault("r1.s1", 5, "data_parallel")]
    (codes, logs), = workers.run(launch, 1, CASE, STEPS, faults, timeout_s=90)
    check(logs, codes, {"r0.s0", "r1.s1"})


def test_a_second_death_during_the_recovery(workers):
    # At the vote of step 2 all have begun that step, so that it is in this change that the second one dies.
    faults = [Fault("r0.s0", 2, "vote"), Fault("r1.s1", 2, "change")]
    (codes, logs), = workers.run(launch, 1, CASE, STEPS, faults, timeout_s=90)
    check(logs, codes, {"r0.s0", "r1.s1"})


def test_lost_shards_are_told_by_all(workers):
    faults = [Fault("r0.s1", 2, "backward"), Fault("r1.s1", 2, "backward")]
    (codes, logs), = workers.run(launch, 1, CASE, STEPS, faults, timeout_s=90)
    told = {logs[seat].lost for seat in codes if seat not in ("r0.s1", "r1.s1")}
    assert len(told) == 1 and "no live member holds" in told.pop()
