"""Under ``CI``: what the kernel refuses may be skipped, and is told; what is missing may not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("ci", "summary"), [({}, "3 skipped"), ({"CI": "1"}, "1 failed, 2 skipped")])
def test_only_what_is_impossible_may_be_skipped_in_ci(tmp_path, ci, summary):
    (tmp_path / "test_skips.py").write_text(
        "import pytest\n"
        "from tests.support.ci import skip_impossible\n"
        "@pytest.fixture\n"
        "def machines(): skip_impossible('namespaces are refused')\n"
        "def test_impossible(): skip_impossible('no such system call')\n"
        "def test_impossible_from_the_start(machines): pass\n"
        "def test_missing(): pytest.skip('no such program')\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.ci", "-p", "no:cacheprovider", "-c", "/dev/null"]
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | ci
    outcome = subprocess.run([*command, tmp_path], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert summary in outcome.stdout, outcome.stdout + outcome.stderr
    for why in ("namespaces are refused", "no such system call"):
        assert f"UserWarning: skipped, as impossible on this machine: {why}" in outcome.stdout
    assert "skipped, which CI does not allow" not in outcome.stdout or ci
