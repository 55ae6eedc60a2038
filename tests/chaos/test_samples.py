"""B2: every sample of an epoch is in one committed step, whoever dies or comes back; and runs without a dense twin."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from lightning_ntp.membership.view import View
from lightning_ntp.policy import shares_by_degree
from tests.chaos.checks import check_trial, run_trial
from tests.chaos.copies import copy_problems
from tests.chaos.joins import waiting_for_joiner
from tests.chaos.journal import StepKey, committed_passes, samples_by_window
from tests.chaos.parity import Dense, compare, slot_problems
from tests.chaos.plan import MODEL
from tests.lightning.runs import Scenario
from tests.lightning.survive_runs import Dropping, Outcome, Scheduled, Trial
from tests.support.batches import TokenDataset

SIZE, EPOCHS = 12 * 7 + 5, 2
CASE = Scenario(
    module=Scheduled,
    degrees=(4, 4),
    size=SIZE,
    batch_size=3,
    accumulate=2,
    trainer={"gradient_clip_val": 1.0, "max_epochs": EPOCHS},
    config=MODEL,
    strategy={"min_tensor_parallel_size": 1},
)
THREE_AND_A_RETURN = "kill r0.s1@2:vote, kill r1.s0@4:backward, kill r0.s0@9:step, return r1.s0@7"
DEAD = ("r0.s0", "r0.s1")


class Shuffled(Sampler):
    """Another order every epoch, with and without the strategy the same."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self):
        return iter(torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def data(order: str, size: int, batch_size: int) -> DataLoader:
    options = {"sampler": Shuffled(size)} if order == "sampler" else {"shuffle": order == "torch" and size > 7}
    return DataLoader(TokenDataset(size, with_index=True), batch_size, **options)


def check_epochs(batches: Mapping[StepKey, list[int]]) -> None:
    for epoch in range(EPOCHS):
        ids = [i for key, window in batches.items() if key[0] == epoch for i in window]
        assert sorted(ids) == list(range(SIZE)), f"epoch {epoch}"


def degrees_in(outcome: Outcome, key: StepKey) -> tuple[int, ...]:
    """Of the view in which a window was committed."""
    passes = [entry for entries in committed_passes(outcome.reports, key).values() for entry in entries]
    generation = max(entry.generation for entry in passes)
    views = [report.views[generation] for report in outcome.reports.values() if generation in report.views]
    return View.from_json(views[0]).topology.degrees


@pytest.mark.parametrize("order", [pytest.param("as they lie", marks=pytest.mark.slow), "sampler"])
def test_three_failures_and_a_return(workers, order):
    case = replace(CASE, data=partial(data, order))
    trial = Trial(case, THREE_AND_A_RETURN, callbacks=partial(waiting_for_joiner, 7))
    outcome = check_trial(workers, trial, DEAD, Dense.of(case))
    assert outcome.reports["r1.s0.1"].steps, "nobody came back"
    batches = samples_by_window(outcome.reports)
    check_epochs(batches)
    windows = math.ceil(SIZE / 12)
    assert [len(ids) for ids in batches.values()] == ([12] * (windows - 1) + [5]) * EPOCHS
    if order == "sampler":
        assert batches[0, 0] != sorted(batches[0, 0])
        assert sorted(batches[0, 0]) != sorted(batches[1, 0])


@pytest.mark.slow
def test_torchs_own_shuffling(workers):
    """Its order is the strategy's: samples are those of an undisturbed run, weights those of a dense run over them."""
    case = replace(CASE, data=partial(data, "torch"))
    undisturbed = samples_by_window(run_trial(workers, Trial(case)).reports)
    outcome = run_trial(workers, Trial(case, THREE_AND_A_RETURN, callbacks=partial(waiting_for_joiner, 7)), DEAD)
    batches = samples_by_window(outcome.reports)
    check_epochs(batches)
    assert {key: sorted(ids) for key, ids in batches.items()} == {key: sorted(i) for key, i in undisturbed.items()}
    problems = compare(outcome.reports, Dense.over(case, batches))
    assert not problems, problems


def test_a_shrinking_global_batch(workers):
    case = replace(CASE, strategy={"min_tensor_parallel_size": 1, "global_batch": "shrink"})
    trial = Trial(case, "kill r0.s1@2:vote, kill r1.s0@5:backward, kill r0.s0@9:step")
    outcome = run_trial(workers, trial, (*DEAD, "r1.s0"))
    batches = samples_by_window(outcome.reports)
    check_epochs(batches)
    lasts = {max(key for key in batches if key[0] == epoch) for epoch in range(EPOCHS)}
    seen = set()
    for key, ids in batches.items():
        degrees = degrees_in(outcome, key)
        assert len(ids) == sum(shares_by_degree(6, degrees, 4, "shrink")) or key in lasts, (key, degrees)
        seen.add(degrees)
    assert seen == {(4, 4), (3, 4), (3, 3), (2, 3)}, "every view has steps of its own"
    problems = compare(outcome.reports, Dense.over(case, batches))
    assert not problems, problems


def test_the_cheaper_global_batch(workers):
    """At degrees 3 and 4 of 4, of 4 + 4 samples: 3 + 5 take 1.25 nominal steps, 3 + 4 take one."""
    strategy = {"min_tensor_parallel_size": 1, "global_batch": "auto"}
    case = replace(CASE, strategy=strategy, batch_size=4, accumulate=1, size=60, trainer={"max_epochs": 1})
    outcome = run_trial(workers, Trial(case, "kill r0.s1@2:backward"), {"r0.s1"})
    batches = samples_by_window(outcome.reports)
    assert [len(ids) for ids in batches.values()] == [8, 8] + [7] * 6 + [2]
    assert sorted(i for ids in batches.values() for i in ids) == list(range(60))
    problems = compare(outcome.reports, Dense.over(case, batches))
    assert not problems, problems


def test_dropout(workers):
    """Masks depend on the replica, so there is no dense twin: slots have the same masks, copies stay equal."""
    case = replace(CASE, module=Dropping)
    trial = Trial(case, THREE_AND_A_RETURN, callbacks=partial(waiting_for_joiner, 7), states=True)
    outcome = run_trial(workers, trial, DEAD)
    batches = samples_by_window(outcome.reports)
    check_epochs(batches)
    for step, key in enumerate(batches):
        assert not slot_problems(outcome.reports, key)
        assert not copy_problems(outcome.reports, step)
        passes = [entry for entries in committed_passes(outcome.reports, key).values() for entry in entries]
        assert all(math.isfinite(entry.loss) and entry.note for entry in passes)
