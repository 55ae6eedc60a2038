"""The arguments of the strategy, checked when they are given."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from lightning_ntp.errors import ConfigError

GlobalBatch = Literal["constant", "shrink", "auto"]
Respawning = Literal["never", "once", "always"]
ReduceDtype = Literal["float32", "float64", "bfloat16"]

REDUCE_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """All time limits, in seconds; checked against each other.

    Attributes:
        beat_s: How often a member gives a sign of life, and how often its host looks for one.
        lease_s: A member whose last acknowledged sign of life is older than this ends itself. It bounds how long a
            member may be stopped (SIGSTOP, a swapping machine) without being taken for dead.
        lease_margin_s: How much longer than the lease the others wait before they take a silent member for dead. Covers
            the drift of two clocks over one lease, and the end of the process itself.
        classify_s: How long a member that got an error waits for news of a death before the error counts as its own.
        join_s: How long live members may take to leave their collectives after a failure; who is later is killed.
        build_s: How long the construction of one group may take.
        hang_s: How long a member may stay out of a collective in which others wait, during a step.
            Default: 60, or less where ``collective_s`` is short.
        slow_hang_s: The same outside a step (loading data, saving, start). Default: half of ``collective_s``, at least
            ``hang_s``.
        shutdown_grace_s: After one member has failed, how long the launcher lets the others end by themselves.
        start_s: How long a member waits for the store and for its peers at start.
        collective_s: How long a collective may wait for a peer: the last resort, if nothing else ended it.

    Raises:
        ConfigError: if a limit is not positive, or two are in the wrong order; the text has all values.
    """

    beat_s: float = 0.1
    lease_s: float = 3.0
    lease_margin_s: float = 1.0
    classify_s: float = 4.5
    join_s: float = 15.0
    build_s: float = 30.0
    hang_s: float | None = None
    slow_hang_s: float | None = None
    shutdown_grace_s: float = 5.0
    start_s: float = 300.0
    collective_s: float = 1800.0

    def __post_init__(self) -> None:
        if self.hang_s is None:
            object.__setattr__(self, "hang_s", min(60.0, max(self.join_s, self.collective_s / 2)))
        if self.slow_hang_s is None:
            object.__setattr__(self, "slow_hang_s", max(self.hang_s, self.collective_s / 2))
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        shown = ", ".join(f"{name}={value}" for name, value in values.items())
        for name, value in values.items():
            if not 0 < value < math.inf:
                raise ConfigError(f"timeouts: {name}={value} must be a positive number of seconds; all: {shown}")
        for smaller, larger, why in _ordered(self):
            if not smaller[1] < larger[1] and not (why.startswith("=") and smaller[1] == larger[1]):
                raise ConfigError(
                    f"timeouts: {smaller[0]} ({smaller[1]}) must be less than {larger[0]} ({larger[1]}): "
                    f"{why.lstrip('= ')}; all: {shown}"
                )

    @property
    def silence_s(self) -> float:
        """A member that was silent for this long is dead: its own lease has ended it before."""
        return self.lease_s + self.lease_margin_s


Limit = tuple[str, float]


def _ordered(limits: Timeouts) -> tuple[tuple[Limit, Limit, str], ...]:
    """(smaller, larger, why) of every pair whose order matters; a reason that starts with ``=`` allows equality."""

    def pair(smaller: str, larger: str, why: str) -> tuple[Limit, Limit, str]:
        return (smaller, getattr(limits, smaller)), (larger, getattr(limits, larger)), why

    several_beats = "3 x beat_s", 3 * limits.beat_s
    return (
        (several_beats, ("lease_s", limits.lease_s), "a single late sign of life must not end a member"),
        pair("lease_margin_s", "lease_s", "= the margin only covers the clocks' drift over one lease"),
        pair("silence_s", "classify_s", "a death that only silence tells must be known before an error is classified"),
        pair("classify_s", "join_s", "a member that still classifies its error must not be killed as late"),
        pair("join_s", "hang_s", "= a slow recovery must not be taken for a hang"),
        pair("hang_s", "slow_hang_s", "= a step is shorter than loading or saving"),
        pair("slow_hang_s", "collective_s", "= the culprit of a hang must be found before all collectives give up"),
        pair("build_s", "collective_s", "= groups are built in less time than a collective may wait"),
        pair("shutdown_grace_s", "start_s", "members that fail at start are told of within the start"),
        pair("start_s", "collective_s", "= members that start late must still find their peers waiting"),
    )


@dataclass(frozen=True, kw_only=True)
class NTPConfig:
    """What a user can choose. ``NTPStrategy`` documents each; here they are checked.

    Raises:
        ConfigError: names the argument, its value and the way out.
    """

    data_parallel_size: int | Literal["auto"] = "auto"
    tensor_parallel_size: int | Literal["auto"] = "auto"
    degrees: tuple[int, ...] | None = None
    min_tensor_parallel_size: int | None = None
    global_batch: GlobalBatch = "constant"
    shares: tuple[int, ...] | None = None
    max_micro_batch: int | None = None
    bucket_cap_mb: float = 25.0
    grad_reduce_dtype: ReduceDtype | None = None
    fault_tolerance: bool = True
    respawn: Respawning = "never"
    verify_every_n_steps: int | None = None
    detectors: tuple[Callable[[], Any], ...] = ()
    xid_policy: Mapping[int, str] = field(default_factory=dict)
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        for name in ("data_parallel_size", "tensor_parallel_size"):
            if getattr(self, name) != "auto":
                _check_count(name, getattr(self, name), "a whole number of at least 1, or 'auto'")
        for name in ("min_tensor_parallel_size", "max_micro_batch", "verify_every_n_steps"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), "a whole number of at least 1, or None")
        for degree in self.degrees or ():
            _check_count("degrees", degree, "a list of whole numbers of at least 1, e.g. [4, 3]")
        _check_choice("global_batch", self.global_batch, ("constant", "shrink", "auto"))
        _check_choice("respawn", self.respawn, ("never", "once", "always"))
        _check_choice("grad_reduce_dtype", self.grad_reduce_dtype, (None, *REDUCE_DTYPES))
        if not (isinstance(self.bucket_cap_mb, (int, float)) and 0 < self.bucket_cap_mb < math.inf):
            raise ConfigError(f"bucket_cap_mb={self.bucket_cap_mb!r} must be a positive number of mebibytes, e.g. 25")

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        return None if self.grad_reduce_dtype is None else REDUCE_DTYPES[self.grad_reduce_dtype]

    def resolve_degrees(self, num_devices: int, num_nodes: int) -> tuple[tuple[int, ...], int]:
        """Degrees of all replicas and the nominal degree, for a job of ``num_devices`` members.

        Raises:
            ConfigError: if the sizes do not fit the devices.
        """
        if self.degrees is not None:
            return self._given_degrees(self.degrees, num_devices)
        tensor, data = self.tensor_parallel_size, self.data_parallel_size
        if tensor == "auto":
            tensor = num_devices // (data if data != "auto" else num_nodes)
        if data == "auto":
            data = num_devices // max(tensor, 1)
        if tensor < 1 or tensor * data != num_devices:
            raise ConfigError(
                f"data_parallel_size={data} x tensor_parallel_size={tensor} is not the number of devices, "
                f"{num_devices}: change one of them, or pass degrees=[...] whose sum is {num_devices}"
            )
        return (tensor,) * data, tensor

    def _given_degrees(self, degrees: Sequence[int], num_devices: int) -> tuple[tuple[int, ...], int]:
        nominal = max(degrees, default=0) if self.tensor_parallel_size == "auto" else self.tensor_parallel_size
        shown = list(degrees)
        if sum(degrees) != num_devices or not degrees:
            raise ConfigError(
                f"degrees={shown} sum to {sum(degrees)}, but the Trainer has {num_devices} devices: pass "
                f"devices={sum(degrees)}, or degrees that sum to {num_devices}"
            )
        if self.data_parallel_size not in ("auto", len(degrees)):
            raise ConfigError(
                f"degrees={shown} are {len(degrees)} replicas, but data_parallel_size={self.data_parallel_size}: "
                "drop one of the two arguments"
            )
        if max(degrees) > nominal:
            raise ConfigError(
                f"degrees={shown}: {max(degrees)} is above tensor_parallel_size={nominal}, the nominal degree; raise it"
            )
        return tuple(degrees), nominal

    def lowest_degree(self, nominal_degree: int, degrees: Sequence[int]) -> int:
        """The lowest degree that a replica may reach: as given, 3/4 of nominal, or lower if the job starts lower.

        Raises:
            ConfigError: if the given one is above nominal.
        """
        lowest = self.min_tensor_parallel_size
        if lowest is None:
            lowest = max(1, nominal_degree * 3 // 4)
        elif lowest > nominal_degree:
            raise ConfigError(
                f"min_tensor_parallel_size={lowest} is above the nominal degree, tensor_parallel_size={nominal_degree}"
            )
        return min(lowest, *degrees)


def _check_count(name: str, value: Any, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r} must be {expected}")


def _check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")
