"""Fixtures of the fake driver. A test module names this one: ``pytest_plugins = ["tests.fake_nvml.fixtures"]``."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from tests.fake_nvml import FakeDriver, build


@pytest.fixture(scope="session")
def compiler() -> str:
    """The C compiler's name; skips without one, which CI counts as failed."""
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        pytest.skip("no C compiler: the fake driver is compiled")
    return found


@pytest.fixture(scope="session")
def fake_library(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake driver's library."""
    return build(compiler, tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="session")
def old_library(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without functions that came with driver 535 and later."""
    return build(compiler, tmp_path_factory.mktemp("old_nvml"), "-DFAKE_NVML_OLD")


@pytest.fixture
def driver(fake_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A driver with two devices, that ``pynvml`` in this process talks to."""
    yield from _in_process(fake_library, tmp_path, monkeypatch)


@pytest.fixture
def old_driver(old_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A driver of 2021, without recovery actions."""
    yield from _in_process(old_library, tmp_path, monkeypatch, driver="470.82.01")


def _in_process(
    library: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, **keys: object
) -> Iterator[FakeDriver]:
    fake = FakeDriver(library, directory, **keys)
    with monkeypatch.context() as patch:
        patch.setenv("FAKE_NVML_STATE", str(fake.path))
        patch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(library)))
        patch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        patch.setattr(pynvml, "_nvmlLib_refcount", 0)
        yield fake
        assert pynvml._nvmlLib_refcount == 0, "the test leaves NVML open: something was not closed or stopped"
