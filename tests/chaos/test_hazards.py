"""User code that a death or a return once led astray: every test here is a fault that a review has found."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_ntp.policy import shares_by_degree
from tests.chaos import hazards
from tests.chaos.checks import check_trial, run_trial
from tests.chaos.joins import waiting_for_joiner
from tests.chaos.parity import Dense, compare
from tests.lightning.runs import SMALL, Scenario
from tests.lightning.survive_runs import Outcome, Recorded, Trial, run_job
from tests.lightning.test_loops import Stream

CASE = Scenario(
    module=Recorded,
    degrees=(2, 2),
    size=36,
    batch_size=3,
    config=SMALL,
    trainer={"max_epochs": 1},
    strategy={"min_tensor_parallel_size": 1},
)
WINDOWS = 6
JOINING = "kill r0.s1@1, return r0.s1@3"


def check(workers: Any, case: Scenario, faults: str, dead: Collection[str], **options: Any) -> Outcome:
    return check_trial(workers, Trial(case, faults, **options), dead, Dense.of(case))


def check_joining(workers: Any, case: Scenario) -> Outcome:
    """r0.s1 dies and comes back at step 4."""
    outcome = check(workers, case, JOINING, (), callbacks=partial(waiting_for_joiner, 3))
    assert outcome.reports["r0.s1.1"].steps, "nobody came back"
    return outcome


def notes(outcome: Outcome) -> list[Any]:
    return [report.summary.notes for report in outcome.reports.values() if report.summary is not None]


@pytest.mark.parametrize(
    ("module", "moment"),
    [
        (hazards.LogsBeforeStep, "vote"),
        (hazards.LogsBeforeStep, "step"),
        (hazards.LogsBehindStep, "between"),
        pytest.param(hazards.GivesUp, "data_parallel", marks=pytest.mark.slow),
    ],
)
def test_hooks_around_the_optimizers_step(workers, module, moment):
    """A committed step is not taken twice, one that is not committed is not left out."""
    norms = module is not hazards.GivesUp
    check(workers, replace(CASE, module=module, norms=norms), f"kill r0.s1@3:{moment}", {"r0.s1"})


def test_a_scheduler_that_is_stepped_by_hand(workers):
    """Committed, it is left out of the second run, whose forward sees later weights: only its loss is another one."""
    case = replace(CASE, module=hazards.SchedulesByHand, norms=False)
    outcome = run_trial(workers, Trial(case, "kill r0.s1@3:between"), {"r0.s1"})
    problems = compare(outcome.reports, Dense.of(case))
    assert all("step 3: loss" in text or "train_loss_epoch" in text for text in problems.wrong), problems
    assert not problems.samples_lost and not problems.samples_doubled
    rates = notes(outcome)
    assert len(rates) == 3 and all(len(told) == WINDOWS for told in rates)
    assert all(later == earlier / 2 for told in rates for earlier, later in zip(told, told[1:], strict=False))


@pytest.mark.slow
def test_validation_that_swallows_errors(workers):
    check(workers, replace(CASE, module=hazards.Swallows), "kill r0.s1@5:evaluation", {"r0.s1"})


@pytest.mark.parametrize("global_batch", ["constant", "shrink"])
def test_every_epoch_is_validated_when_its_length_changes(workers, global_batch):
    strategy = {"global_batch": global_batch, "min_tensor_parallel_size": 1}
    case = replace(CASE, module=hazards.Validates, strategy=strategy, trainer={"max_epochs": 3}, size=40)
    outcome = run_trial(workers, Trial(case, "kill r0.s1@2"), {"r0.s1"})
    [told] = {tuple(each) for each in notes(outcome)}
    assert [epoch for epoch, _ in told] == [0, 1, 2]
    per_epoch = 7 if global_batch == "constant" else 10  # 40 samples, four in a step of degrees 1 and 2
    assert told[2][1] - told[1][1] == per_epoch


@pytest.mark.parametrize("count", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_shares_follow_a_death_at_start(workers, count):
    outcome = check(workers, replace(CASE, module=hazards.Dealt), f"kill r0.s1@0:outside#{count}", {"r0.s1"})
    expected = shares_by_degree(3, (1, 2), 2, "constant"), (1, 2)
    assert [each for told in notes(outcome) for each in told] == [expected] * (3 * WINDOWS)


def test_metrics_in_the_step_and_in_hooks_around_it(workers):
    case = replace(CASE, module=hazards.Counts, accumulate=3, batch_size=1)
    outcome = check(workers, case, "kill r0.s1@1:data_parallel", {"r0.s1"})
    # Each of two replicas has three micro-batches in a step, whatever their sizes.
    assert notes(outcome) == [[2 * 3 * WINDOWS, case.size]] * 3


# Those that come back


@pytest.mark.parametrize(
    ("module", "trainer"),
    [
        (hazards.LogsFirst, {}),
        pytest.param(Recorded, {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2}, marks=pytest.mark.slow),
        pytest.param(Recorded, {"check_val_every_n_epoch": 2, "max_epochs": 2}, marks=pytest.mark.slow),
        pytest.param(Recorded, {"check_val_every_n_epoch": None, "val_check_interval": 4}, marks=pytest.mark.slow),
    ],
    ids=["a key of veterans", "reloaded loaders", "validation in the second epoch", "validation by total batches"],
)
def test_a_joiner_does_what_the_others_do(workers, module, trainer):
    outcome = check_joining(workers, replace(CASE, module=module, size=60, trainer={"max_epochs": 1, **trainer}))
    names = {frozenset(report.summary.metrics) for report in outcome.reports.values() if report.summary is not None}
    assert len(names) == 1, "all have the same keys"


def test_a_joiner_as_slot_0_of_its_replica(workers):
    """The epoch's means hold what the replica logged before it came."""
    case = replace(CASE, degrees=(3, 1), size=84)
    faults = "kill r0.s0@1, return r0.s0@4, kill r0.s1@8"
    outcome = check(workers, case, faults, {"r0.s1"}, callbacks=partial(waiting_for_joiner, 4))
    assert outcome.reports["r0.s0.1"].summary.global_step == 14


@pytest.mark.slow
def test_a_joiner_reduces_alone_before_its_first_step(workers):
    outcome = check_joining(workers, replace(CASE, module=hazards.ReducesAtStart, size=60))
    assert outcome.reports["r0.s1.1"].summary.notes == [3.0, 3.0], "it is the only member yet"


def test_a_joiner_that_fails_ends_alone(workers):
    case = replace(CASE, module=hazards.CannotJoin, size=72)
    callbacks = partial(waiting_for_joiner, 3, limit_s=2.0)
    outcome = check(workers, case, JOINING, {"r0.s1"}, callbacks=callbacks)
    assert "this node has no disk" in outcome.written


def streamed(size: int, batch_size: int) -> DataLoader:
    return DataLoader(Stream(size), batch_size=batch_size)


@pytest.mark.slow
def test_a_stream_is_not_joined(workers):
    case = replace(CASE, size=72, data=streamed, strategy={"shares": [3, 3], "min_tensor_parallel_size": 1})
    callbacks = partial(waiting_for_joiner, 3, limit_s=2.0)
    outcome = check(workers, case, JOINING, {"r0.s1"}, callbacks=callbacks)
    assert "iterable" in outcome.written


# Stops


@pytest.mark.parametrize("faults", ["kill r1.s0@1", pytest.param("kill r1.s0@4:vote", marks=pytest.mark.slow)])
def test_sigterm_with_a_single_survivor(workers, faults):
    """It stops at the next step, as all do."""
    case = replace(CASE, degrees=(1, 1), module=hazards.Terminated, size=60)
    (outcome,) = workers.run(run_job, 1, Trial(case, faults), timeout_s=90)
    report = outcome.reports["r0.s0.0"]
    assert report.summary is not None and report.summary.global_step in (4, 5), outcome.written
    problems = compare(outcome.reports, Dense.of(replace(case, module=Recorded)), num_steps=4)
    assert not problems, problems


@pytest.mark.slow
def test_a_death_while_a_replica_retires(workers):
    """A member dies in the hand-over that another has not begun yet."""
    strategy = {"min_tensor_parallel_size": 2}
    case = replace(CASE, module=hazards.DiesHandingOver, degrees=(3, 3), size=48, strategy=strategy)
    case = replace(case, config=replace(SMALL, width=24, num_heads=6, num_kv_heads=3))
    outcome = run_trial(workers, Trial(case, "kill r0.s1@1, kill r0.s2@1"), {"r0.s0", "r0.s1", "r0.s2", "r1.s2"})
    problems = compare(outcome.reports, Dense.of(replace(case, module=Recorded)))
    assert not problems, problems
