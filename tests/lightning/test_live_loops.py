"""Loops whose members die: what the tests of kills at every phase have not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from tests.chaos.parity import Dense, compare
from tests.lightning.live_loops import (
    AwaitReturn,
    Degrees,
    adversaries,
    after_the_fit,
    evaluate,
    low_precision,
    several,
)
from tests.lightning.live_members import Play, Played, Script, play
from tests.lightning.runs import SMALL, Scenario, loader
from tests.lightning.survive_runs import Recorded, Trial, run_job
from tests.lightning.test_loops import Stream

Weights = dict[str, torch.Tensor]

CASE = Scenario(
    module=Recorded,
    degrees=(2, 2),
    size=72,
    batch_size=4,
    config=SMALL,
    strategy={"min_tensor_parallel_size": 1},
)


def run(workers, script: Script, *arguments: Any, faults: str = "", degrees: Degrees = (2, 2)) -> Played:
    return workers.run(play, 1, Play(script, degrees, faults, arguments), timeout_s=180)[0]


def dense(rank: int, world_size: int, store_address: str, script: Script, *arguments: Any) -> Any:
    return script((), *arguments)


def assert_same_weights(found: list[Weights], expected: Weights, tolerance: float = 1e-11) -> None:
    """Of all members; only the leader has them."""
    [ours] = [weights for weights in found if weights]
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation_alone(workers, stage):
    """A leader dies in the first pass over the data, another member in the second."""
    faults = "kill r0.s0@0:evaluation#2, kill r1.s1@0:evaluation#5"
    results = run(workers, evaluate, stage, faults=faults).survivors("r0.s0.0", "r1.s1.0")
    [right] = workers.run(dense, 1, evaluate, stage)
    for number, expected in enumerate(right):
        ours = [told[number] for told in results.values()]
        if stage != "predict":
            assert all(told == pytest.approx(expected, rel=1e-12) for told in ours)
            continue
        assert sorted(key for told in ours for key in told) == list(range(30)), "each sample on one replica"
        for told in ours:
            for key, value in told.items():
                torch.testing.assert_close(value, expected[key], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("moment", ["forward", "vote#2", "backward#2"])
def test_two_optimizers(workers, moment):
    """A step that was committed is not taken again; what the discriminator sees may be the next generator's work."""
    results = run(workers, adversaries, faults=f"kill r0.s1@6:{moment}").survivors("r0.s1.0")
    [(steps, expected)] = workers.run(dense, 1, adversaries)
    assert {taken for taken, _ in results.values()} == {steps} == {16}
    assert_same_weights([weights for _, weights in results.values()], expected, 2e-3)


class ByHand(Recorded):
    """One optimizer step in every training_step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


def streamed(size: int, batch_size: int) -> DataLoader:
    return DataLoader(Stream(size), batch_size=batch_size)


def by_workers(size: int, batch_size: int) -> DataLoader:
    return loader(size, batch_size, num_workers=2)


CASES = {
    "manual": replace(CASE, module=ByHand, norms=False),
    "passes": replace(CASE, strategy={"max_micro_batch": 2, "min_tensor_parallel_size": 1}),
    "stream": replace(CASE, data=streamed, strategy={"shares": [4, 4], "min_tensor_parallel_size": 1}),
    "workers": replace(CASE, data=by_workers, accumulate=2, trainer={"max_epochs": 2}),
}


def return_at_6() -> list[Callback]:
    return [AwaitReturn(6)]


@pytest.mark.parametrize("case", CASES)
def test_kinds_of_steps(workers, case):
    """Parity with the dense run, and every sample once, through three kills."""
    faults, scenario = "kill r0.s0@2:backward, kill r1.s1@4:vote", CASES[case]
    comes_back = case != "stream"
    trial = Trial(scenario, faults + ", return r0.s0@5" * comes_back, callbacks=return_at_6 if comes_back else list)
    (outcome,) = workers.run(run_job, 1, trial, timeout_s=120)
    dead = {"r1.s1"} if comes_back else {"r0.s0", "r1.s1"}
    assert {seat for seat, code in outcome.codes.items() if code} == dead, outcome.written
    problems = compare(outcome.reports, Dense.of(scenario))
    assert not problems, problems


def test_several_trainers_and_models(workers):
    """A death in the first fit: later Trainers and models go on with those who are left. So does one in the last."""
    results = run(workers, several, faults="kill r0.s0@2:vote, kill r1.s0@9:forward").survivors("r0.s0.0", "r1.s0.0")
    [right] = workers.run(dense, 1, several)
    for told, expected in zip(zip(*results.values(), strict=True), right, strict=True):
        if isinstance(expected, float):
            assert all(value == pytest.approx(expected, rel=1e-11) for value in told)
        else:
            assert {step for step, _ in told} == {expected[0]}
            assert_same_weights([weights for _, weights in told], expected[1])


@pytest.mark.parametrize("saves", [True, False], ids=["others-save", "others-end"])
def test_a_death_behind_the_fit(workers, saves):
    results = run(workers, after_the_fit, "r0.s0.0", saves).survivors("r0.s0.0")
    if saves:
        [expected] = workers.run(dense, 1, after_the_fit, "", True)
        assert_same_weights(list(results.values()), expected)


def test_low_precision(workers):
    """bf16-mixed: finite, equal losses on the slots of a replica, equal copies on all members."""
    results = run(workers, low_precision, faults="kill r0.s1@3:backward", degrees=(2, 3)).survivors("r0.s1.0")
    losses = {name: told[0] for name, told in results.items()}
    assert all(torch.tensor(told).isfinite().all() for told in losses.values())
    assert losses["r1.s0.0"] == losses["r1.s1.0"] == losses["r1.s2.0"]
    shared = set.intersection(*(set(told[1]) for told in results.values()))
    assert shared
    for _, weights in results.values():
        assert all(torch.equal(weights[name], results["r0.s0.0"][1][name]) for name in shared)
