"""What the test process, the zygote and the ranks tell each other.

The test process and the zygote exchange pickled objects of this file. A rank sends its zygote one frame: a flag, a
length, and bytes that only the test process unpacks, so that the zygote never imports a test module.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass, field
from typing import Any

import torch

RESULT = b"R"
ERROR = b"E"
_HEADER = struct.Struct("<cQ")


@dataclass(frozen=True)
class Request:
    """One run: ``num_ranks`` processes that all call ``function`` ("module:qualname").

    Attributes:
        arguments: Positional arguments after rank, world size and store address, packed.
        directory: Folder of this run; holds ``rank{r}.out``, ``.err``, ``.stacks``; the default working directory.
        expect_exit: Exit codes (negative: signals) of ranks that must not return a result.
    """

    function: str
    arguments: bytes
    num_ranks: int
    timeout_s: float
    grace_s: float
    directory: str
    cwd: str
    sys_path: tuple[str, ...]
    env: dict[str, str | None] = field(default_factory=dict)
    expect_exit: dict[int, int] = field(default_factory=dict)
    allow_leftovers: bool = False


@dataclass(frozen=True)
class Ready:
    """The zygote has its imports done, or ``problem`` says why not."""

    problem: str = ""


@dataclass(frozen=True)
class Started:
    """All ranks of a run were forked."""

    store_address: str
    pids: tuple[int, ...]


class Cancel:
    """Kill the ranks of the current run now."""


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        order: Position among the ranks of the run by the time at which its end became known.
        exit_code: As ``subprocess`` counts: negative for a signal.
        was_stopped: The zygote killed it, after a failure elsewhere or at the time limit.
        flag: ``RESULT``, ``ERROR`` or empty if the rank ended without a word.
        payload: The packed result or ``RankError``.
    """

    rank: int
    order: int
    exit_code: int
    was_stopped: bool
    flag: bytes
    payload: bytes


@dataclass(frozen=True)
class RunEnd:
    """How a run ended.

    Attributes:
        leftovers: Command lines of processes that outlived the ranks that started them; they were killed.
    """

    ends: tuple[RankEnd, ...]
    timed_out: bool
    leftovers: tuple[str, ...]


@dataclass(frozen=True)
class RankError:
    """An exception that left a rank's function, as text; ``exception`` is the packed object if it can be packed."""

    type_name: str
    message: str
    traceback: str
    exception: bytes | None


def pack(value: Any) -> bytes:
    """Serialise ``value``; tensors travel by value, never through shared memory."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def frame(flag: bytes, payload: bytes) -> bytes:
    """The bytes that a rank writes into its pipe."""
    return _HEADER.pack(flag, len(payload)) + payload


def parse_frame(data: bytes | bytearray) -> tuple[bytes, bytes]:
    """Flag and payload of a complete frame; two empty strings while bytes are missing."""
    if len(data) < _HEADER.size:
        return b"", b""
    flag, length = _HEADER.unpack_from(data)
    if len(data) < _HEADER.size + length:
        return b"", b""
    return flag, bytes(data[_HEADER.size : _HEADER.size + length])
