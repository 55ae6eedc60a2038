"""That the judge of chaos runs sees what is wrong: real outcomes of which one thing is changed."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from lightning_ntp.layout import Sharded
from tests.chaos.checks import run_trial
from tests.chaos.judge import judge, summary
from tests.chaos.parity import Dense, compare
from tests.chaos.plan import Plan, scenario_of
from tests.chaos.run import is_good
from tests.chaos.shards import lost_parameters
from tests.lightning.survive_runs import Outcome
from tests.support.job import NEVER_ENDED, End


@pytest.fixture(scope="module")
def dense() -> Dense:
    return Dense.of(scenario_of((2, 2), 2))


@pytest.fixture(scope="module")
def lost(workers) -> Outcome:
    """Both holders of a part die at once."""
    plan = Plan("", (2, 2), ("kill r0.s1@1:vote", "kill r1.s1@1:vote"), windows=2)
    return run_trial(workers, plan.trial, ("r0.s0", "r0.s1", "r1.s0", "r1.s1"))


@pytest.fixture(scope="module")
def recovered(workers) -> Outcome:
    plan = Plan("", (2, 2), ("kill r0.s1@1:vote",), windows=2)
    return run_trial(workers, plan.trial, ("r0.s1",))


def test_a_true_loss(lost, dense):
    verdict = judge("", lost, dense)
    assert verdict.status == "lost" and not verdict.problems, verdict
    view = max(lost.reports["r0.s0.0"].views.items())[1]
    layouts = lost.reports["r0.s0.0"].layouts
    sharded = {name for name, layout in layouts.items() if isinstance(layout, Sharded)}
    assert set(lost_parameters(view, layouts)) == sharded


def test_a_loss_that_is_not_true(lost, dense):
    false = copy.deepcopy(lost)
    for name in ("r0.s0.0", "r1.s0.0"):  # as if the dead one's part were held by somebody
        _, view = max(false.reports[name].views.items())
        (count, ((replica, degree, slot),)), = view["holdings"]["r0.s0"]["held"]
        view["holdings"]["r0.s0"]["held"] = [[count, [[replica, degree, slot], [replica, degree, 1]]]]
    verdict = judge("", false, dense)
    assert verdict.status == "wrong" and "every unit has a holder" in str(verdict.problems)


def test_a_loss_that_is_not_told_alike(lost, dense):
    other = copy.deepcopy(lost)
    other.reports["r1.s0.0"].summary.error = "ShardsLost: something else"
    assert judge("", other, dense).status == "wrong"


def test_a_recovery(recovered, dense):
    verdict = judge("", recovered, dense)
    assert verdict.status == "recovered" and not verdict.problems, verdict
    assert 0 < verdict.recovery_s < 20 and verdict.replay_s is not None and not verdict.is_hang


@pytest.mark.parametrize(
    "what", ["weights", "norm", "lost", "doubled", "slots", "checkpoint", "loss", "hung", "end"]
)
def test_what_is_wrong(recovered, dense, what):
    outcome = copy.deepcopy(recovered)
    report = outcome.reports["r1.s0.0"]
    step, entry = report.steps[2], next(iter(outcome.reports["r1.s1.0"].passes[1, 0].values()))
    others = [each.passes[1, 0][entry.index] for each in outcome.reports.values() if each.replica == 1]
    if what == "weights":
        step.weights["model.embed.weight"] = step.weights["model.embed.weight"] + 1e-9
    elif what == "norm":
        step.norm *= 1 + 1e-9
    elif what == "lost":
        for other in others:
            other.ids.pop()
    elif what == "doubled":
        for other in others:
            other.ids.append(other.ids[0])
    elif what == "slots":
        entry.ids[0] = entry.ids[0] + 1
    elif what == "checkpoint":
        outcome.saved[2]["model.norm.weight"] += 1e-9
    elif what == "loss":
        for other in others:
            other.loss += 1e-6
    elif what == "hung":
        outcome.ends[-1] = replace(outcome.ends[-1], code=NEVER_ENDED)
    else:
        outcome.ends[-1] = End(outcome.ends[-1].name, 1, outcome.ends[-1].at, False)
    verdict = judge("", outcome, dense)
    assert verdict.status == ("hung" if what == "hung" else "wrong"), verdict
    assert not is_good(summary([verdict]))
    counts = verdict.problems.samples_lost, verdict.problems.samples_doubled
    assert counts == {"lost": (1, 0), "doubled": (0, 1)}.get(what, (0, 0))


def test_a_step_that_nobody_told_of(recovered, dense):
    reports = copy.deepcopy(recovered.reports)
    for report in reports.values():
        report.passes.pop((1, 1), None)
    assert compare(reports, dense).samples_lost == len(dense.samples[-1])
