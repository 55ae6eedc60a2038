"""Pytest hooks: under ``CI`` a skipped test counts as failed, unless it is marked ``gpu`` or impossible on the machine.

What CI cannot run must be deselected by a marker, in sight; a missing package must not turn a test off unnoticed. What
the machine's kernel refuses cannot be installed: such a test is skipped by :func:`skip_impossible`, and a warning at
the end of the run says so.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import NoReturn

import pytest

_IMPOSSIBLE = "impossible on this machine: "


def skip_impossible(why: str) -> NoReturn:
    """Skip a test because of what the kernel has refused: under CI, too. Not for a program or package that is missing.

    Args:
        why: What was refused, and how.
    """
    warnings.warn(f"skipped, as {_IMPOSSIBLE}{why}", stacklevel=2)
    pytest.skip(_IMPOSSIBLE + why)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    if not item.get_closest_marker("gpu"):
        _fail_skip(outcome.get_result())


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    outcome = yield
    _fail_skip(outcome.get_result())


def _fail_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if "CI" in os.environ and report.skipped and not hasattr(report, "wasxfail") and not _is_impossible(report):
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not allow: {report.longrepr}"


def _is_impossible(report: pytest.TestReport | pytest.CollectReport) -> bool:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    return reason.startswith(f"Skipped: {_IMPOSSIBLE}")
