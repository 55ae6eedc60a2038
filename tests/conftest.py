"""Fixtures of all tests: the ranks' zygote, and a guard that restores global state and fails a test that leaks.

``NTP_TEST_SESSION`` is set here for our children, so that a process whose parent has ended is still known as ours.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

import lightning.fabric.utilities.rank_zero as fabric_rank_zero
import lightning_utilities.core.rank_zero as utilities_rank_zero
import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support import processes
from tests.support.ci import pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401
from tests.support.zygote import PRELOAD, Zygote

_SESSION_VARIABLE = "NTP_TEST_SESSION"
_RANK_ZERO = (fabric_rank_zero.rank_zero_only, utilities_rank_zero.rank_zero_only)
_zygote_pid = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    os.environ[_SESSION_VARIABLE] = uuid.uuid4().hex
    torch.set_num_threads(1)
    try:
        import hypothesis
    except ImportError:  # `make gpu` runs with whatever interpreter the GPU machine has
        return
    hypothesis.settings.register_profile("shared-machine", deadline=None, derandomize="CI" in os.environ)
    hypothesis.settings.load_profile("shared-machine")


@pytest.fixture(scope="session")
def workers(request: pytest.FixtureRequest) -> Iterator[Zygote]:
    """Ranks on request: ``workers.run(function, num_ranks, *arguments)``; see ``tests/support/zygote.py``."""
    with Zygote(_modules_to_preload()) as zygote:
        request.config.stash[_zygote_pid] = zygote.pid
        yield zygote


@pytest.fixture(autouse=True)
def guard(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seed, run the test, restore global state, and fail the test if something of it is still there."""
    state = GlobalState()
    # Fixtures of a wider scope run before this one, and the zygote would hand their dtype on to all ranks.
    assert state.dtype == torch.float32, "a fixture of a wider scope has left its default dtype behind"
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    threads = set(threading.enumerate())
    yield
    state.restore()
    leaks = find_leaks(threads, request.config.stash.get(_zygote_pid, None))
    if leaks:
        pytest.fail("the test leaves behind: " + "; ".join(leaks), pytrace=False)


@dataclass
class GlobalState:
    """What a test may change in its process and gets restored."""

    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    cwd: str = field(default_factory=os.getcwd)
    ranks: list[int | None] = field(default_factory=lambda: [getattr(only, "rank", None) for only in _RANK_ZERO])
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)
    num_threads: int = field(default_factory=torch.get_num_threads)
    torch_rng: torch.Tensor = field(default_factory=torch.get_rng_state)
    python_rng: tuple = field(default_factory=random.getstate)
    numpy_rng: dict | tuple = field(default_factory=np.random.get_state)

    def restore(self) -> None:
        current_test = os.environ.get("PYTEST_CURRENT_TEST")
        os.environ.clear()
        os.environ.update(self.environ)
        if current_test is not None:  # pytest's own, it deletes it itself
            os.environ["PYTEST_CURRENT_TEST"] = current_test
        os.chdir(self.cwd)
        for only, rank in zip(_RANK_ZERO, self.ranks, strict=True):
            only.rank = rank
        torch.set_default_dtype(self.dtype)
        torch.use_deterministic_algorithms(self.deterministic)
        torch.set_num_threads(self.num_threads)
        torch.set_rng_state(self.torch_rng)
        random.setstate(self.python_rng)
        np.random.set_state(self.numpy_rng)


def find_leaks(threads_before: set[threading.Thread], zygote_pid: int | None, grace_s: float = 2.0) -> list[str]:
    """End what outlives a test in this process, and say what it was; what ends within ``grace_s`` is no leak."""
    leaks = []
    if dist.is_initialized():
        dist.destroy_process_group()
        leaks.append("an initialised default process group")
    until = time.monotonic() + grace_s
    while (found := _processes(zygote_pid)) and time.monotonic() < until:
        time.sleep(0.02)
    for pid in found:
        leaks.append(f"process {pid}: {processes.command_line(pid) or '(no command line)'}")
        processes.kill(pid)
    for thread in set(threading.enumerate()) - threads_before:
        if not thread.daemon:
            thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive() and not thread.daemon:
            leaks.append(f"thread {thread.name}")
    return leaks


def _processes(zygote_pid: int | None) -> list[int]:
    """Our running children, and processes of this session whose parent has ended."""
    ours = set(processes.children(os.getpid())) - {zygote_pid}
    return [pid for pid in ours | _orphans() if processes.is_running(pid)]


def _orphans() -> set[int]:
    entry = f"{_SESSION_VARIABLE}={os.environ[_SESSION_VARIABLE]}"
    ended_parents = [pid for pid in processes.all_pids() if processes.has_environment(pid, entry)]
    known = {os.getpid(), *processes.descendants(os.getpid())}
    return set(ended_parents) - known


def _modules_to_preload() -> list[str]:
    """What the collected test modules import, as far as it is ours or slow: each rank would import it anew."""
    slow = ("pytest", "hypothesis", "transformers", "torch.utils.tensorboard")
    ours = [name for name in sys.modules if name.startswith(("lightning_ntp.", "tests.support."))]
    return [*PRELOAD, *(name for name in slow if name in sys.modules), *sorted(ours)]
