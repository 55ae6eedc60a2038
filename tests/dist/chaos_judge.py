"""What a chaos run was worth: judged from the members' logs, after all of them have ended."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_ntp.membership.exits import ExitCode
from tests.dist.bare_model import uncovered

TOLERANCE = 1e-12
KILLED = -9
Log = list[dict[str, Any]]


@dataclass(frozen=True)
class Injury:
    """What was done to a member: kind, seat, and when on the monotonic clock."""

    kind: str
    seat: str
    at: float


@dataclass
class Trial:
    """One run.

    Attributes:
        seed: Of its plan.
        status: ``recovered``, ``undisturbed``, ``lost``, ``failed`` (a user's exception, told by all), ``hang`` or
            ``wrong``.
        problems: What was wrong, for the reader.
        recovery_s: Last death to the slowest survivor's readiness to step; ``None`` where that cannot be said.
        replay_s: From there to the first committed step.
        deaths_only: Whether nobody was stopped or stuck, so that the recovery did not wait for a time limit.
        injuries: What was done, ``kind seat``.
        views: Number of views.
        recomputed: Members that finished a step with a vote computed anew.
        joined: Members that came back and were admitted.
    """

    seed: int
    status: str = ""
    problems: list[str] = field(default_factory=list)
    recovery_s: float | None = None
    replay_s: float | None = None
    deaths_only: bool = True
    injuries: list[str] = field(default_factory=list)
    views: int = 0
    recomputed: int = 0
    joined: int = 0


def judge(
    seed: int, directory: Path, codes: Mapping[str, int | str], injuries: Sequence[Injury], num_steps: int
) -> Trial:
    """Read the logs and say what happened."""
    logs = {name: read_log(directory / name) for name in codes}
    trial = Trial(seed, injuries=[f"{injury.kind} {injury.seat}" for injury in injuries])
    trial.deaths_only = all(injury.kind == "kill" for injury in injuries)
    victims = {i.seat for i in injuries if i.kind in ("kill", "stop", "hang", "by host")}
    survivors = [seat for seat in logs if seat not in victims]
    _check_views(trial, logs)
    ends = {seat: _end_of(logs[seat], codes, seat) for seat in survivors}
    trial.joined = sum(any(e["event"] == "view" for e in log) for seat, log in logs.items() if is_joiner(seat))
    for seat in [seat for seat in survivors if is_joiner(seat) and ends[seat] == "fenced"]:  # came after the end
        del ends[seat]
        survivors.remove(seat)
    hung = [seat for seat, end in ends.items() if end == "hung"]
    if hung:
        trial.status, trial.problems = "hang", [*trial.problems, f"never ended: {hung}"]
    elif set(ends.values()) == {"done"}:
        trial.status = "recovered" if len(trial.injuries) else "undisturbed"
        _check_weights(trial, [logs[seat] for seat in survivors], num_steps)
        _measure(trial, [logs[seat] for seat in survivors if not is_joiner(seat)], injuries)
    elif set(ends.values()) == {"lost"}:
        trial.status = "lost"
        _check_loss(trial, [logs[seat] for seat in survivors])
    elif set(ends.values()) <= {"failed", "own", "done"} and any(i.kind == "raise" for i in injuries):
        trial.status = "failed"
        _check_failure(trial, logs, survivors, ends, injuries)
    else:
        trial.problems.append(f"ends differ: {ends}")
    for log in logs.values():
        trial.recomputed += sum(entry["event"] == "settled" and entry["recomputed"] for entry in log)
    if trial.problems and trial.status != "hang":
        trial.status = "wrong"
    return trial


def is_joiner(name: str) -> bool:
    """Whether a process of this name came back to its seat: ``r0.s1.1``."""
    return name.count(".") > 1


def read_log(path: Path) -> Log:
    """The lines of a member's log; none if it never got so far."""
    try:
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    except FileNotFoundError:
        return []


def _end_of(log: Log, codes: Mapping[str, int | str], seat: str) -> str:
    code = codes[seat]
    told = next((e["event"] for e in reversed(log) if e["event"] in ("done", "lost", "fenced", "failed", "own")), "")
    expected = {"done": 0, "own": 1, "lost": ExitCode.SHARDS_LOST, "failed": ExitCode.JOB_FAILED}
    expected["fenced"] = ExitCode.FENCED
    if code == "hung":
        return "hung"
    return told if told and expected[told] == code else f"exit code {code} after {told or 'nothing'}"


def _views(log: Log) -> dict[int, dict[str, Any]]:
    return {entry["view"]["generation"]: entry["view"] for entry in log if entry["event"] == "view"}


def _check_views(trial: Trial, logs: Mapping[str, Log]) -> None:
    seen: dict[int, dict[str, Any]] = {}
    for seat, log in logs.items():
        for generation, view in _views(log).items():
            if seen.setdefault(generation, view) != view:
                trial.problems.append(f"views differ: generation {generation} at {seat}")
    trial.views = len(seen)


def _check_weights(trial: Trial, logs: Sequence[Log], num_steps: int) -> None:
    for log in logs:
        done = log[-1] if log[-1]["event"] == "done" else next(e for e in log if e["event"] == "done")
        if not done["wrong_by"] <= TOLERANCE or done["steps"] != num_steps:
            trial.problems.append(f"wrong weights: off by {done['wrong_by']} after {done['steps']} steps")


def _check_loss(trial: Trial, logs: Sequence[Log]) -> None:
    """All say it in the same generation, and its view shows that it is true."""
    views = [max(_views(log).items()) for log in logs]
    if len({generation for generation, _ in views}) != 1:
        trial.problems.append("false loss: told in different generations")
    elif not uncovered(views[0][1]["holdings"], views[0][1]["step"]):
        trial.problems.append("false loss: every unit had a live holder")


def _check_failure(
    trial: Trial, logs: Mapping[str, Log], survivors: Sequence[str], ends: Mapping[str, str], injuries: Sequence[Injury]
) -> None:
    told = [e["t"] for log in logs.values() for e in log if e["event"] == "error" and "ValueError" in e["text"]]
    raised_at = min(told, default=next(injury.at for injury in injuries if injury.kind == "raise"))
    for seat in survivors:
        last = next(e for e in reversed(logs[seat]) if e["event"] in ("failed", "own", "done"))
        if ends[seat] == "failed" and "the user's own mistake" not in last["text"]:
            trial.problems.append(f"wrong end: {seat} does not tell the user's exception")
        if last["t"] - raised_at > 5:
            trial.problems.append(f"wrong end: {seat} ended {last['t'] - raised_at:.1f} s after the exception")


def _measure(trial: Trial, logs: Sequence[Log], injuries: Sequence[Injury]) -> None:
    deaths = [injury.at for injury in injuries if injury.kind in ("kill", "by host")]
    if not deaths or any(entry["event"] == "done" and entry["t"] < deaths[-1] for log in logs for entry in log):
        return  # somebody had finished before the last death: nothing to recover
    ready = [_first(log, "ready", max(deaths)) for log in logs]
    stepped = [_first(log, "stepped", max(deaths)) for log in logs]
    if None not in ready:
        trial.recovery_s = max(ready) - max(deaths)
        if None not in stepped:
            trial.replay_s = max(stepped) - max(ready)


def _first(log: Log, event: str, after: float) -> float | None:
    return min((entry["t"] for entry in log if entry["event"] == event and entry["t"] > after), default=None)


def summary(trials: Sequence[Trial]) -> dict[str, Any]:
    """The line of JSON at the end."""

    def count(text: str) -> int:
        return sum(any(problem.startswith(text) for problem in trial.problems) for trial in trials)

    deaths = [trial.recovery_s for trial in trials if trial.recovery_s is not None and trial.deaths_only]
    limits = [trial.recovery_s for trial in trials if trial.recovery_s is not None and not trial.deaths_only]
    return {
        "runs": len(trials),
        "recovered": sum(trial.status == "recovered" for trial in trials),
        "undisturbed": sum(trial.status == "undisturbed" for trial in trials),
        "shards_lost": sum(trial.status == "lost" for trial in trials),
        "user_errors": sum(trial.status == "failed" for trial in trials),
        "hangs": sum(trial.status == "hang" for trial in trials),
        "wrong_weights": count("wrong weights"),
        "views_differ": count("views differ"),
        "false_losses": count("false loss"),
        "wrong_ends": count("wrong end") + count("ends differ"),
        "joined": sum(trial.joined for trial in trials),
        "recomputed_votes": sum(trial.recomputed for trial in trials),
        "recovery_s": percentiles(deaths),
        "recovery_hang_s": percentiles(limits),
        "replay_s": percentiles([t.replay_s for t in trials if t.replay_s is not None and t.deaths_only]),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"n": 0}
    ordered = sorted(values)
    at = {"p50": 0.5, "p95": 0.95, "max": 1.0}
    found = {name: round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], 3) for name, q in at.items()}
    return {"n": len(ordered), **found}
