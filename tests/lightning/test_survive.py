"""B1 and B2 on the Trainer: parity with the dense run through deaths, each sample exactly once.

The rows are a selection that covers every phase; ``tests/chaos/test_table.py`` has all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from lightning_ntp.membership.exits import ExitCode
from tests.chaos.checks import check_row, check_trial, run_trial
from tests.chaos.joins import waiting_for_joiner
from tests.chaos.parity import Dense
from tests.chaos.shards import lost_parameters
from tests.chaos.table import scenario_of, table
from tests.lightning.runs import Scenario
from tests.lightning.survive_runs import Recorded, Trial
from tests.support.models import ModelConfig

SELECTION = (
    "forward, rank 0, 3+3",
    "backward, last, 3+2",
    "pre-reshard, rank 0, 3+2",
    "DP sum, two, 3+3",
    "post-reshard, last, 3+3",
    "vote, first leg, middle, 3+2",
    "vote, middle leg, rank 0 and one in the last leg, 3+3",
    "optimizer step, two, 3+2",
    "between steps, last, 3+3",
    "validation, rank 0, 3+3",
    "checkpoint, rank 0, 3+2",
    "loading by a worker, middle, 3+3",
    "start, weights under way, rank 0, 3+2",
    "recovery, rank 0, 3+3",
)
THIN = {"min_tensor_parallel_size": 1}
CASE = Scenario(
    module=Recorded,
    degrees=(3, 3),
    size=88,
    batch_size=2,
    accumulate=3,
    trainer={"gradient_clip_val": 1.0, "max_epochs": 1},
    config=ModelConfig(width=24, num_heads=6, num_kv_heads=3, bias=True, layers=1),
    strategy=THIN,
)


@pytest.fixture(scope="module")
def dense_of() -> Callable[[tuple[int, ...]], Dense]:
    known: dict[tuple[int, ...], Dense] = {}

    def find(degrees: tuple[int, ...]) -> Dense:
        if degrees not in known:
            known[degrees] = Dense.of(scenario_of(degrees))
        return known[degrees]

    return find


def check(workers, faults: str, dead: set[str], scenario: Scenario = CASE):
    """Run ``scenario`` with faults and compare it with its dense run; returns the members' reports."""
    return check_trial(workers, Trial(scenario, faults), dead, Dense.of(scenario)).reports


@pytest.mark.parametrize("name", SELECTION)
def test_a_death(workers, dense_of, name):
    row = table()[name]
    check_row(workers, row, dense_of(row.degrees))


def test_undisturbed(workers, dense_of):
    outcome = check_trial(workers, Trial(scenario_of((3, 2)), checkpoints=True), (), dense_of((3, 2)))
    assert len(outcome.saved) == 2 and all(len(report.views) == 1 for report in outcome.reports.values())


@pytest.mark.parametrize(
    ("faults", "dead"),
    [
        ("kill r0@5:backward", {"r0.s0", "r0.s1", "r0.s2"}),
        ("kill r0.s0@1, raise r1.s1@2:tensor_parallel#4, kill r1.s0@3, kill r0.s1@5", {"r0.s0", "r1.s0", "r0.s1"}),
    ],
)
def test_several_deaths(workers, dense_of, faults, dead):
    check_trial(workers, Trial(scenario_of((3, 3)), faults, checkpoints=True), dead, dense_of((3, 3)))


def test_a_whole_replica_comes_back(workers, dense_of):
    trial = Trial(scenario_of((3, 3)), "kill r0@1, return r0@2", callbacks=partial(waiting_for_joiner, 3))
    outcome = check_trial(workers, trial, (), dense_of((3, 3)))
    assert {name for name, report in outcome.reports.items() if report.is_joiner and report.steps} == {
        "r0.s0.1", "r0.s1.1", "r0.s2.1",
    }  # fmt: skip


def test_a_thin_replica_retires(workers, dense_of):
    case = replace(scenario_of((3, 3)), strategy={"min_tensor_parallel_size": 3})
    outcome = check_trial(workers, Trial(case, "kill r0.s1@2"), {"r0.s0", "r0.s1", "r0.s2"}, dense_of((3, 3)))
    assert outcome.codes["r0.s0"] == outcome.codes["r0.s2"] == ExitCode.DRAINED


def test_a_loss_is_told_alike(workers):
    """Two members that hold the same part die at once."""
    trial = Trial(scenario_of((3, 3)), "kill r0.s1@2:vote, kill r1.s1@2:vote")
    outcome = run_trial(workers, trial, {f"r{replica}.s{index}" for replica in range(2) for index in range(3)})
    survivors = [end for end in outcome.ends if end.code != -9]
    assert [end.code for end in survivors] == [ExitCode.SHARDS_LOST] * 4
    errors = {outcome.reports[end.name].summary.error for end in survivors}
    assert len(errors) == 1 and "no live member holds all of model.embed.weight" in errors.pop()
    for end in survivors:
        report = outcome.reports[end.name]
        assert "model.embed.weight" in lost_parameters(max(report.views.items())[1], report.layouts)


def test_hooks_tell_of_a_death(workers, dense_of):
    outcome = check_trial(workers, Trial(scenario_of((3, 3)), "kill r0.s1@2:vote"), {"r0.s1"}, dense_of((3, 3)))
    for report in outcome.reports.values():
        if report.name == "r0.s1.0":
            continue
        told = [(name, event) for _, name, event in report.told if name.startswith("on_ntp")]
        assert [name for name, _ in told] == ["on_ntp_failure", "on_ntp_view", "on_ntp_recovered"], report.name
        event = told[-1][1]
        assert [str(seat) for seat in event.gone] == ["r0.s1"] and event.degrees_after == {0: 2, 1: 3}
        assert event.seconds["total"] > 0
