"""Whether what the members of a job have told is the dense run, step by step, and every sample in it once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ntp.layout import Replicated
from lightning_ntp.parallel.shards import put_local
from tests.chaos.journal import MemberReport, Pass, StepKey, StepState, committed_passes
from tests.lightning.runs import Scenario, fit_dense
from tests.support.batches import TokenDataset
from tests.support.reference import History

TOLERANCE = 1e-12


@dataclass
class Dense:
    """The undisturbed run in one process.

    Attributes:
        history: Losses, norms, weights by step.
        samples: Of each step.
        keys: (epoch, window) of each step.
        metrics: Logged values at its end.
    """

    history: History
    samples: list[list[int]]
    keys: list[StepKey]
    metrics: dict[str, float]

    @classmethod
    def of(cls, scenario: Scenario) -> Dense:
        """Over the scenario's own global batches."""
        return _fit(scenario)

    @classmethod
    def over(cls, scenario: Scenario, batches: Mapping[StepKey, Sequence[int]]) -> Dense:
        """Over given global batches, in the order of their windows."""
        keys = sorted(batches)
        lists = [list(batches[key]) for key in keys]
        data = DataLoader(TokenDataset(1 + max(map(max, lists)), with_index=True), batch_sampler=lists)
        one_epoch = replace(scenario, trainer=scenario.trainer | {"max_epochs": 1, "limit_val_batches": 0})
        return replace(_fit(one_epoch, data), keys=keys, metrics={})


def _fit(scenario: Scenario, data: DataLoader | None = None) -> Dense:
    history, metrics, module = fit_dense(scenario, data)
    return Dense(history, [seen.ids for seen in module.seen], [seen.step for seen in module.seen], metrics)


@dataclass
class Problems:
    """What is wrong with a job, in words, by kind."""

    wrong: list[str] = field(default_factory=list)
    samples_lost: int = 0
    samples_doubled: int = 0

    def __bool__(self) -> bool:
        return bool(self.wrong or self.samples_lost or self.samples_doubled)

    def __str__(self) -> str:
        counts = f"{self.samples_lost} samples lost, {self.samples_doubled} doubled"
        return "; ".join([counts, *self.wrong[:6], *(["..."] if len(self.wrong) > 6 else [])])


def compare(reports: Mapping[str, MemberReport], dense: Dense, num_steps: int | None = None) -> Problems:
    """Compare all that was told with the dense run over the same global batches.

    Args:
        reports: Of all processes, the dead ones too.
        dense: The dense run.
        num_steps: Steps to compare; all, if not given.
    """
    problems = Problems()
    total = len(dense.history.losses) if num_steps is None else num_steps
    for step in range(total):
        _check_step(problems, reports, step, dense)
    for report in reports.values():
        for state in report.steps.values():
            if num_steps is None or state.step < num_steps:
                problems.wrong += _state_problems(report, state, dense)
    if num_steps is None:
        late = {key for report in reports.values() for key in report.passes} - set(dense.keys)
        problems.wrong += [f"windows that the dense run has not: {sorted(late)}"] if late else []
        problems.wrong += _metric_problems(reports, dense)
    return problems


def _check_step(problems: Problems, reports: Mapping[str, MemberReport], step: int, dense: Dense) -> None:
    """Samples and loss of one committed step."""
    key, wanted = dense.keys[step], Counter(dense.samples[step])
    if not any(key in report.passes for report in reports.values()):
        problems.samples_lost += wanted.total()
        return
    passes = [entry for entries in committed_passes(reports, key).values() for entry in entries]
    found = Counter(i for entry in passes for i in entry.ids)
    problems.samples_lost += (wanted - found).total()
    problems.samples_doubled += (found - wanted).total()
    problems.wrong += slot_problems(reports, key)
    loss, right = loss_of(passes), dense.history.losses[step]
    if not abs(loss - right) <= TOLERANCE * abs(right):
        problems.wrong.append(f"step {step}: loss {loss!r}, dense {right!r}")


def loss_of(passes: Sequence[Pass]) -> float:
    """The mean loss over the global batch."""
    counted = sum(entry.weight for entry in passes)
    return sum(entry.weight * entry.loss for entry in passes if entry.weight) / counted if counted else torch.nan


def slot_problems(reports: Mapping[str, MemberReport], key: StepKey) -> list[str]:
    """Slots of a replica have the same samples and notes in the last run of a window, as far as they came."""
    best = committed_passes(reports, key)
    found = []
    for report in reports.values():
        entries = report.passes.get(key, {})
        known = {entry.index: entry for entry in best.get(report.replica, [])}
        for index, entry in entries.items():
            same = known.get(index)
            if same is None or same.generation != entry.generation:
                continue
            if (same.ids, same.note) != (entry.ids, entry.note):
                found.append(f"{report.name}, window {key}, pass {index}: other samples or masks than its replica")
    return found


def put_whole(weights: Mapping[str, Tensor], report: MemberReport, state: StepState) -> dict[str, Tensor]:
    """Dense tensors, by parameter, in which this member's parts are written over ``weights``."""
    whole = {}
    for name, part in state.weights.items():
        layout, local = report.layouts[name], torch.from_numpy(part)
        if isinstance(layout, Replicated):
            whole[name] = local
        else:
            whole[name] = weights[name].clone()
            put_local(whole[name], local, layout, state.degree, state.slot)
    return whole


def _state_problems(report: MemberReport, state: StepState, dense: Dense) -> list[str]:
    if state.step >= len(dense.history.weights):
        return [f"{report.name}: step {state.step} is one too many"]
    weights = {f"model.{name}": weight for name, weight in dense.history.weights[state.step].items()}
    scale, norm = max(weight.abs().max() for weight in weights.values()), dense.history.norms[state.step]
    whole = put_whole(weights, report, state)
    off = {name: float((mine - weights[name]).abs().max()) for name, mine in whole.items()}
    worst = max(off, key=off.__getitem__)
    found = []
    if not off[worst] <= TOLERANCE * scale:
        found.append(f"{report.name}, step {state.step}: {worst} is off by {off[worst]:.2e}")
    if norm is not None and not abs(state.norm - norm) <= TOLERANCE * norm:
        found.append(f"{report.name}, step {state.step}: norm {state.norm!r}, dense {norm!r}")
    return found


def saved_problems(saved: Mapping[int, dict[str, Tensor]], dense: Dense) -> list[str]:
    """Checkpoints hold the dense weights of their step."""
    found = []
    for step, state in saved.items():
        for name, weight in dense.history.weights[step - 1].items():
            mine = state[f"model.{name}"]
            if mine.shape != weight.shape or not (mine - weight).abs().max() <= TOLERANCE * weight.abs().max():
                found.append(f"the checkpoint after step {step - 1}: {name} differs")
    return found


def _metric_problems(reports: Mapping[str, MemberReport], dense: Dense) -> list[str]:
    """What a replica has logged in an epoch is lost with its last member, also behind its last window."""
    epoch = dense.keys[-1][0]
    last = {key for key in dense.keys if key[0] == epoch}
    replicas = {report.replica for report in reports.values()}
    whole = {report.replica for report in reports.values() if last <= set(report.passes)}
    there = {report.replica for report in reports.values() if report.summary is not None and not report.summary.error}
    if not replicas == whole == there:
        return []
    return [
        f"{report.name}: {name} is {value!r}, dense {dense.metrics[name]!r}"
        for report in reports.values()
        if report.summary is not None and not report.summary.error
        for name, value in report.summary.metrics.items()
        if name in ("val_loss", "train_loss_epoch") and name in dense.metrics
        and not abs(value - dense.metrics[name]) <= TOLERANCE * abs(dense.metrics[name])
    ]

