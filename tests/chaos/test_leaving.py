"""Members that leave in an orderly way: drained, in a replica that has become too thin, or without memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_ntp.membership.exits import ExitCode
from tests.chaos.checks import check_trial
from tests.chaos.parity import Dense
from tests.lightning.runs import Scenario
from tests.lightning.survive_runs import Recorded, Trial
from tests.support.models import ModelConfig

CASE = Scenario(
    module=Recorded,
    degrees=(3, 3),
    size=12 * 12,
    batch_size=2,
    accumulate=3,
    trainer={"gradient_clip_val": 1.0, "max_epochs": 1},
    config=ModelConfig(width=24, num_heads=6, num_kv_heads=3, bias=True, layers=1),
    strategy={"min_tensor_parallel_size": 2},
)
REPLICA_0 = {"r0.s0", "r0.s1", "r0.s2"}


@pytest.fixture(scope="module")
def dense() -> Dense:
    return Dense.of(CASE)


def test_a_drained_leader_does_not_lead_when_it_comes_back(workers, dense):
    outcome = check_trial(workers, Trial(CASE, "drain r0.s0@2, return r0.s0@3"), (), dense)
    assert [end.code for end in outcome.ends if end.name.startswith("r0.s0")] == [ExitCode.DRAINED, 0]


def test_a_single_replica_loses_nothing_by_a_drain(workers):
    """B7: nobody else has what the drained member holds."""
    case = replace(CASE, degrees=(3,), size=6 * 8)
    outcome = check_trial(workers, Trial(case, "drain r0.s1@2"), {"r0.s1"}, Dense.of(case))
    assert outcome.codes["r0.s1"] == ExitCode.DRAINED


def test_a_replica_below_the_lowest_degree_retires(workers, dense):
    outcome = check_trial(workers, Trial(CASE, "kill r0.s1@2, kill r0.s2@4"), REPLICA_0, dense)
    assert outcome.codes["r0.s0"] == ExitCode.DRAINED


def test_a_retired_replica_comes_back_once_it_has_members_enough(workers, dense):
    faults = "kill r0.s1@1, kill r0.s2@2, return r0.s0@4, return r0.s2@4"
    outcome = check_trial(workers, Trial(CASE, faults), {"r0.s1"}, dense)
    joiners = [report for report in outcome.reports.values() if report.is_joiner]
    assert sorted(report.seat for report in joiners) == ["r0.s0", "r0.s2"]


def test_smaller_passes_where_memory_is_short_after_a_shrink(workers, dense):
    check_trial(workers, Trial(CASE, "kill r0.s1@2, oom r0.s0@3:forward"), {"r0.s1"}, dense)


def test_a_replica_without_memory_for_a_single_sample_retires(workers, dense):
    ooms = ", ".join(f"oom r0.s0@3:forward#{count}" for count in range(1, 5))
    check_trial(workers, Trial(CASE, f"kill r0.s1@2, {ooms}"), REPLICA_0, dense)
