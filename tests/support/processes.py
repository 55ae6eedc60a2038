"""Looking at processes through ``/proc``, without a third-party package: ``make gpu`` runs where there may be none."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def children(pid: int) -> list[int]:
    """The direct children of ``pid``, zombies included; empty if there is no such process."""
    try:
        listings = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except FileNotFoundError:  # the process ended, or the kernel has no CONFIG_PROC_CHILDREN
        return [child for child in all_pids() if _parent(child) == pid]
    return [int(child) for listing in listings for child in listing.split()]


def descendants(pid: int) -> list[int]:
    """Children, their children and so on, parents first."""
    found = children(pid)
    for child in found:
        found.extend(children(child))
    return found


def all_pids() -> list[int]:
    """Every process that is visible from here."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def is_running(pid: int) -> bool:
    """Whether ``pid`` exists and is not a zombie."""
    return _stat_field(pid, 0) not in ("", "Z", "X")


def command_line(pid: int) -> str:
    """The command line of ``pid`` for a message; empty for a zombie or a process that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()[:200]
    except OSError:
        return ""


def has_environment(pid: int, entry: str) -> bool:
    """Whether ``pid`` was started (by exec) with the environment entry ``NAME=value``."""
    try:
        return entry.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, or of another user
        return False


def kill(pid: int) -> None:
    """SIGKILL ``pid`` if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def die_with_parent() -> None:
    """Have the kernel SIGKILL this process when its parent ends, however that ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none of them can get lost."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def _parent(pid: int) -> int:
    return int(_stat_field(pid, 1) or 0)


def _stat_field(pid: int, index: int) -> str:
    """Field ``index`` after the command name (which may itself hold spaces and brackets) of ``/proc/PID/stat``."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[index]
    except (OSError, IndexError):
        return ""
