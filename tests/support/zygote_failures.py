"""Turn the end of a run into results, or into an exception that shows the likely cause first."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.support.zygote_messages import ERROR, RESULT, RankEnd, RankError, Request, RunEnd, unpack

_TAIL_LINES = 60
_FRAMES = 12
# What a rank says when *another* rank is the cause. Only the order of display depends on it.
_CONSEQUENCE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|read error|write error|pair closure|timed out waiting|gloo", re.I
)


class ZygoteError(RuntimeError):
    """The zygote itself failed, or was asked for something that it cannot do."""


class WorkerError(RuntimeError):
    """Ranks failed.

    Attributes:
        errors: By rank, what it raised (``type_name``, ``message``, ``traceback``).
        exit_codes: By rank, as ``subprocess`` counts: negative for a signal.
    """

    def __init__(self, message: str, errors: dict[int, RankError] | None = None, exit_codes: tuple[int, ...] = ()):
        super().__init__(message)
        self.errors = errors or {}
        self.exit_codes = exit_codes


class WorkerTimeout(WorkerError):
    """Ranks were killed at the time limit."""


def results_of(end: RunEnd, request: Request) -> list[Any]:
    """What every rank returned, None for ranks that were expected to die.

    Raises:
        WorkerError, WorkerTimeout: see ``Zygote.run``.
    """
    __tracebackhide__ = True
    problems = {rank_end.rank: _problem(rank_end, request) for rank_end in end.ends}
    failed = [rank_end for rank_end in end.ends if problems[rank_end.rank]]
    if not failed:
        return [unpack(rank_end.payload) if rank_end.flag == RESULT else None for rank_end in end.ends]
    errors = {rank_end.rank: unpack(rank_end.payload) for rank_end in failed if rank_end.flag == ERROR}
    failed.sort(key=lambda rank_end: (_suspicion(rank_end, errors), rank_end.order))
    sections = [f"{problems[failed[0].rank]} ({len(failed)} of {request.num_ranks} ranks failed)"]
    if end.timed_out:
        sections[0] = f"{request.function} reached the time limit of {request.timeout_s:g} s: {sections[0]}"
    for rank_end in failed:
        sections.append(f"----- {problems[rank_end.rank]} -----")
        if rank_end.rank in errors:
            sections.append(errors[rank_end.rank].traceback.rstrip())
    for rank_end in end.ends:
        sections += _output(rank_end.rank, request.directory)
    kind = WorkerTimeout if end.timed_out else WorkerError
    codes = tuple(rank_end.exit_code for rank_end in end.ends)
    raise kind("\n".join(sections), errors, codes) from _exception(errors.get(failed[0].rank))


def _problem(end: RankEnd, request: Request) -> str:
    """One line on what is wrong with how a rank ended; empty if nothing is."""
    expected = request.expect_exit.get(end.rank)
    if end.was_stopped:
        return f"rank {end.rank} was still running and was killed"
    if end.flag == ERROR:
        error = unpack(end.payload)
        return f"rank {end.rank} raised {error.type_name}: {error.message}"
    if expected is not None and end.exit_code != expected:
        return f"rank {end.rank} ended with exit code {end.exit_code} where {expected} was expected"
    if expected is None and end.flag != RESULT:
        return f"rank {end.rank} ended with exit code {end.exit_code} and no result"
    return ""


def _suspicion(end: RankEnd, errors: dict[int, RankError]) -> int:
    """0 for a likely cause, more for what is likely its consequence."""
    if end.was_stopped:
        return 2
    error = errors.get(end.rank)
    return 1 if error is not None and _CONSEQUENCE.search(f"{error.type_name}: {error.message}") else 0


def _exception(error: RankError | None) -> BaseException | None:
    return unpack(error.exception) if error is not None and error.exception is not None else None


def _output(rank: int, directory: str) -> list[str]:
    sections = []
    for name, suffix in (("stdout", "out"), ("stderr", "err")):
        lines = _read(directory, rank, suffix).splitlines()
        if lines:
            sections.append(f"----- rank {rank} {name} (last {_TAIL_LINES} lines at most) -----")
            sections += lines[-_TAIL_LINES:]
    stacks = _read(directory, rank, "stacks").strip()
    if stacks:
        sections.append(f"----- rank {rank} stacks (innermost {_FRAMES} frames of each thread) -----")
        sections += ["\n".join(thread.splitlines()[: _FRAMES + 1]) for thread in stacks.split("\n\n")]
    return sections


def _read(directory: str, rank: int, suffix: str) -> str:
    file = Path(directory) / f"rank{rank}.{suffix}"
    return file.read_text(errors="replace") if file.exists() else ""
