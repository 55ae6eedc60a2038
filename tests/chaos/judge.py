"""What a chaos run was worth: judged from the journals, after all processes have ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_ntp.membership.exits import ExitCode
from tests.chaos.journal import MemberReport, samples_by_window
from tests.chaos.parity import Dense, Problems, compare, saved_problems
from tests.chaos.shards import lost_parameters
from tests.lightning.runs import Scenario
from tests.lightning.survive_runs import Outcome
from tests.support.job import NEVER_ENDED, End

KILLED = -9


@dataclass
class Verdict:
    """One run.

    Attributes:
        plan: What was planned, for the reader.
        status: ``recovered``, ``lost``, ``hung`` or ``wrong``.
        problems: What was wrong.
        faults: How many planned faults have happened.
        recovery_s: From the last death to the slowest survivor's readiness to step; ``None`` if that cannot be said.
        replay_s: From there to the first committed step on the slowest survivor.
        is_hang: Whether somebody was found by a time limit. Then ``recovery_s`` counts from the fault itself.
        joined: Processes that came back and were admitted.
        notes: What happened besides: deaths that were not planned.
    """

    plan: str
    status: str = ""
    problems: Problems = field(default_factory=Problems)
    faults: int = 0
    recovery_s: float | None = None
    replay_s: float | None = None
    is_hang: bool = False
    joined: int = 0
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        times = {"ready after": self.recovery_s, "replay": self.replay_s}
        times = [f"{name} {value:.2f} s" for name, value in times.items() if value is not None]
        text = ", ".join([self.status, f"{self.faults} faults", f"{self.joined} joined", *times, *self.notes])
        return f"{self.plan}: {text}" + (f"\n    {self.problems}" if self.problems else "")


def judge(plan: str, outcome: Outcome, dense: Dense) -> Verdict:
    """Look at the ends, then at the weights and samples of all steps."""
    reports = outcome.reports
    verdict = Verdict(plan, faults=sum(len(report.faults) for report in reports.values()))
    verdict.joined = sum(bool(report.views) for report in reports.values() if report.is_joiner)
    verdict.notes = [f"{end.name} ended with {end.code}" for end in outcome.ends if end.code in _DEATHS]
    survivors = [end for end in outcome.ends if not _is_gone(end, reports)]
    codes = {end.code for end in survivors}
    if NEVER_ENDED in codes:
        verdict.status = "hung"
        verdict.problems.wrong.append("never ended: " + ", ".join(e.name for e in survivors if e.code == NEVER_ENDED))
    elif codes == {0}:
        verdict.status = "recovered"
        verdict.problems = compare(reports, dense)
        measure(verdict, outcome, [end.name for end in survivors])
    elif codes == {int(ExitCode.SHARDS_LOST)}:
        verdict.status = "lost"
        names = [end.name for end in survivors]
        # The step that the last view commits may have been voted on by members that hold a part of the gradients only:
        # nobody goes on from it.
        last = min(max(reports[name].views.items())[1]["step"] for name in names)
        verdict.problems = compare(reports, dense, last)
        verdict.problems.wrong += loss_problems(reports, names)
    else:
        shown = ", ".join(f"{end.name} {end.code} ({_error_of(reports, end.name)})" for end in survivors)
        verdict.problems.wrong.append(f"ends differ, or are none that was planned: {shown}")
    verdict.problems.wrong += saved_problems(outcome.saved, dense)
    if verdict.problems and verdict.status != "hung":
        verdict.status = "wrong"
    return verdict


def judge_shrinking(plan: str, outcome: Outcome, scenario: Scenario) -> Verdict:
    """The same where the global batch depends on who lives: by a dense run over the batches that were taken."""
    batches = samples_by_window(outcome.reports)
    dense = Dense.over(scenario, {key: ids for key, ids in batches.items() if ids})
    verdict = judge(plan, outcome, dense)
    if verdict.status == "recovered":
        for epoch in range(scenario.trainer["max_epochs"]):
            found = Counter(i for key, ids in batches.items() if key[0] == epoch for i in ids)
            verdict.problems.samples_lost += (Counter(range(scenario.size)) - found).total()
            verdict.problems.samples_doubled += (found - Counter(range(scenario.size))).total()
        verdict.status = "wrong" if verdict.problems else "recovered"
    return verdict


_DEATHS = (ExitCode.LEASE_EXPIRED, ExitCode.FENCED, ExitCode.STORE_LOST)


def _is_gone(end: End, reports: Mapping[str, MemberReport]) -> bool:
    """Whether the process was no part of the job at its end: dead, drained, or a joiner that came too late."""
    if end.code in (KILLED, ExitCode.LEASE_EXPIRED, ExitCode.DRAINED):
        return True
    return end.code == ExitCode.FENCED


def _error_of(reports: Mapping[str, MemberReport], name: str) -> str:
    summary = reports[name].summary if name in reports else None
    return "" if summary is None else summary.error[-300:]


def loss_problems(reports: Mapping[str, MemberReport], survivors: Sequence[str]) -> list[str]:
    """All survivors say the same, and the view that each said it in shows that it is true."""
    found = []
    texts = {_error_of(reports, name) for name in survivors}
    if len(texts) != 1 or not next(iter(texts)).startswith("ShardsLost"):
        found.append(f"a loss is not told alike: {sorted(texts)}")
    layouts = next((report.layouts for report in reports.values() if report.layouts), {})
    for name in survivors:
        view = max(reports[name].views.items())[1]
        if not lost_parameters(view, layouts):
            found.append(f"{name} tells of a loss in generation {view['generation']}, where every unit has a holder")
    return found


def measure(verdict: Verdict, outcome: Outcome, survivors: Sequence[str]) -> None:
    """Time from the last death to readiness, and from there through the step that is run again."""
    reports = outcome.reports
    deaths = [end for end in outcome.ends if end.code in (KILLED, ExitCode.LEASE_EXPIRED)]
    if not deaths:
        return
    last = deaths[-1]
    verdict.is_hang = any(end.by_launcher or end.code == ExitCode.LEASE_EXPIRED for end in deaths)
    since = last.at
    if verdict.is_hang:
        told = [at for end in deaths if end.name in reports for at, _ in reports[end.name].faults]
        since = max(told, default=last.at)
    generation = _generation_without([end.name for end in deaths], reports, survivors)
    if generation is None:
        return
    there = [reports[name] for name in survivors if generation in reports[name].views and not reports[name].is_joiner]
    ready = [_ready_at(report, generation) for report in there]
    if None in ready or not ready or max(ready) < since:
        return
    verdict.recovery_s = max(ready) - since
    stepped = [min((at for at in report.stepped.values() if at > max(ready)), default=None) for report in there]
    if None not in stepped and any(generation in report.ready for report in there):
        verdict.replay_s = max(stepped) - max(ready)


def _generation_without(
    dead: Sequence[str], reports: Mapping[str, MemberReport], survivors: Sequence[str]
) -> int | None:
    """The first view that has none of the dead processes and was entered by the survivors."""
    views: dict[int, dict[str, Any]] = {}
    for name in survivors:
        views |= reports[name].views
    first = None
    for generation, view in sorted(views.items(), reverse=True):
        if any(f"{seat}.{number}" in dead for seat, number in view["incarnations"].items()):
            break
        first = generation
    return first


def _ready_at(report: MemberReport, generation: int) -> float | None:
    """When the change to a generation was complete, or a step began in it, whatever this process tells first."""
    changes = [at for at, name, event in report.told if name == "on_ntp_recovered" and event.generation >= generation]
    begins = [at for number, (at, _) in report.ready.items() if number >= generation]
    return min(changes + begins, default=None)


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The line of JSON at the end."""
    deaths = [v for v in verdicts if v.recovery_s is not None and not v.is_hang]
    hangs = [v for v in verdicts if v.recovery_s is not None and v.is_hang]
    return {
        "runs": len(verdicts),
        "recovered": sum(verdict.status == "recovered" for verdict in verdicts),
        "shards_lost": sum(verdict.status == "lost" for verdict in verdicts),
        "hangs": sum(verdict.status == "hung" for verdict in verdicts),
        "wrong_weights": sum(bool(verdict.problems.wrong) for verdict in verdicts if verdict.status != "hung"),
        "samples_lost": sum(verdict.problems.samples_lost for verdict in verdicts),
        "samples_doubled": sum(verdict.problems.samples_doubled for verdict in verdicts),
        "recovery_s": percentiles([verdict.recovery_s for verdict in deaths]),
        "recovery_hang_s": percentiles([verdict.recovery_s for verdict in hangs]),
        "replay_s": percentiles([verdict.replay_s for verdict in deaths if verdict.replay_s is not None]),
    }


def percentiles(values: Sequence[float | None]) -> dict[str, float | None]:
    """p50, p95 and the largest; ``None`` where there are no values."""
    ordered = sorted(value for value in values if value is not None)
    at = {"p50": 0.5, "p95": 0.95, "max": 1.0}
    return {
        name: round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], 3) if ordered else None
        for name, q in at.items()
    }
