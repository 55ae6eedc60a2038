"""A folder of tests that pytest silently passes by tests nothing."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_folder_of_tests_is_passed_by(request):
    ignored = request.config.getini("norecursedirs")
    folders = {path.parent for path in TESTS.rglob("test_*.py")}
    names = {part for folder in folders for part in folder.relative_to(TESTS.parent).parts}
    assert not [name for name in names if any(fnmatch(name, pattern) for pattern in ignored)]
