"""Pytest hooks: under ``CI`` a skipped test counts as failed, unless it is marked ``gpu``.

What CI cannot run must be deselected by a marker, in sight; a missing package must not turn a test off unnoticed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


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
    if "CI" in os.environ and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not allow: {report.longrepr}"
