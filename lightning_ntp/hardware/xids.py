"""XIDs: the numbers under which the driver reports errors, and what each of them means for a member.

An XID is a hint, the driver's state is the verdict; but that state may lag, so a device with an XID of the worst kind
leaves the job at once.

The table follows NVIDIA's XID catalog, compared with what NVIDIA's device plugin, DCGM and GPUd do. Any entry can be
overridden:

    >>> policy = XidPolicy({94: "drain"})
    >>> policy.action(94), policy.action(79), policy.action(4711)
    (<Action.DRAIN: 'drain'>, <Action.DRAIN: 'drain'>, <Action.PROBE: 'probe'>)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from lightning_ntp.errors import ConfigError
from lightning_ntp.hardware.findings import Finding, Verdict


class Action(Enum):
    """What is done about an XID."""

    DRAIN = "drain"  # the device leaves the job now
    APP = "app"  # the process is at fault, or has lost its context: start it again, drain if that repeats
    NOTE = "note"  # for the log
    PROBE = "probe"  # it can mean anything: the driver's state decides


@dataclass(frozen=True)
class Xid:
    """An entry of the table.

    Attributes:
        action: What is done about it.
        name: In words.
    """

    action: Action
    name: str


_D, _A, _N, _P = Action.DRAIN, Action.APP, Action.NOTE, Action.PROBE
_ENGINES = (
    *(39, 40, 41, 70, 71, 72, 75, 76, 77, 82, 83, 84, 85, 86, 88, 89, 139),
    *range(96, 106),
    *range(126, 136),
)
_NOTED = (14, 37, 38, 106, 107, 108, 142, 152, 153)

XIDS: Mapping[int, Xid] = {
    **{number: Xid(_A, "copy or video engine error") for number in _ENGINES},
    **{number: Xid(_N, "driver information") for number in _NOTED},
    8: Xid(_A, "channel idle timeout"),
    13: Xid(_A, "graphics engine exception"),
    31: Xid(_A, "memory page fault"),
    32: Xid(_A, "corrupted push buffer"),
    43: Xid(_A, "channel reset"),
    44: Xid(_N, "fault during context switch"),
    45: Xid(_A, "preemptive removal of the process"),
    46: Xid(_D, "GPU stopped processing"),
    48: Xid(_D, "double-bit ECC error"),
    54: Xid(_P, "auxiliary power missing"),
    61: Xid(_P, "internal microcontroller breakpoint"),
    62: Xid(_D, "internal microcontroller halt"),
    63: Xid(_N, "row remap or page retirement recorded"),
    64: Xid(_D, "row remap or page retirement failed"),
    66: Xid(_N, "illegal register access by the driver"),
    67: Xid(_N, "register access violation"),
    68: Xid(_A, "video decoder exception"),
    69: Xid(_A, "graphics engine class error"),
    74: Xid(_P, "NVLink error"),
    78: Xid(_P, "vGPU start error"),
    79: Xid(_D, "GPU has fallen off the bus"),
    92: Xid(_N, "high rate of single-bit ECC errors"),
    93: Xid(_N, "erase limit of the board's memory"),
    94: Xid(_A, "contained memory error"),
    95: Xid(_D, "uncontained memory error"),
    109: Xid(_A, "context switch timeout"),
    110: Xid(_D, "security fault"),
    119: Xid(_D, "GSP does not answer"),
    120: Xid(_D, "GSP error"),
    121: Xid(_N, "chip-to-chip link error"),
    136: Xid(_P, "link training failed"),
    137: Xid(_N, "NVLink privilege error"),
    140: Xid(_D, "unrecovered ECC error"),
    141: Xid(_N, "fast path error"),
    143: Xid(_D, "GPU initialisation error"),
    **{number: Xid(_P, "NVLink error") for number in range(144, 151)},
    151: Xid(_P, "key rotation error"),
    154: Xid(_N, "recovery action changed"),
    155: Xid(_D, "NVLink error that software has raised"),
    156: Xid(_D, "resource retired"),
    157: Xid(_N, "resource retirement failed"),
    158: Xid(_D, "fatal GPU timeout"),
    160: Xid(_N, "channel retired"),
    161: Xid(_N, "channel retirement failed"),
    **{number: Xid(_N, "power smoothing off") for number in range(162, 166)},
    167: Xid(_D, "fatal PCIe timeout"),
    168: Xid(_N, "reduced memory capacity"),
    169: Xid(_D, "SEC2 halt"),
    171: Xid(_N, "uncorrectable DRAM error"),
    172: Xid(_D, "uncorrectable SRAM error"),
}
"""What is known; everything else is probed."""


@dataclass(frozen=True)
class XidPolicy:
    """What is done about XIDs.

    Attributes:
        overrides: Actions that replace the table's, by XID.
        repeats: Application errors on one device after which it leaves.
        within_s: In which they have to happen.
        burst_s: One crash is often told as several XIDs: those that come so soon after the first count once.

    Raises:
        ConfigError: for an action that there is none of, or numbers below their least.
    """

    overrides: Mapping[int, Action | str] = field(default_factory=dict)
    repeats: int = 3
    within_s: float = 3600.0
    burst_s: float = 1.0

    def __post_init__(self) -> None:
        for xid, action in self.overrides.items():
            if not _is_action(action):
                raise ConfigError(
                    f"overrides[{xid}]={action!r}: an XID's action is one of {', '.join(a.value for a in Action)}"
                )
        if self.repeats < 1 or self.within_s <= 0 or self.burst_s < 0:
            raise ConfigError(
                f"repeats={self.repeats}, within_s={self.within_s}, burst_s={self.burst_s}: give at least 1 repeat, "
                "a time above 0, and a burst of at least 0"
            )

    def action(self, xid: int) -> Action:
        """What is done about an XID."""
        if xid in self.overrides:
            return Action(self.overrides[xid])
        return XIDS[xid].action if xid in XIDS else Action.PROBE

    def name(self, xid: int) -> str:
        """An XID in words."""
        return XIDS[xid].name if xid in XIDS else "unknown"


class XidHistory:
    """Judges the XIDs of one device in the order in which they come.

    A process that an application error ends takes its history along: whoever starts it again has to keep it, or the
    error would repeat for ever.

    Args:
        policy: What is done about XIDs.
        seen: When application errors have happened on this device before, on the clock that :meth:`judge` is given.
    """

    def __init__(self, policy: XidPolicy, seen: Iterable[float] = ()) -> None:
        self._policy = policy
        self._incidents: list[float] = []
        for at_s in sorted(seen):
            self._count(at_s)

    def judge(self, xid: int, at_s: float, subject: str = "") -> Finding:
        """What an XID at ``at_s`` means, as far as it says so by itself."""
        action, text = self._policy.action(xid), f"XID {xid} ({self._policy.name(xid)})"
        verdict = Verdict.LOST if action is Action.DRAIN else Verdict.NOTE
        if action is Action.APP:
            times = self._count(at_s)
            if times >= self._policy.repeats:
                verdict = Verdict.LOST
            if times > 1:
                text += f", application error {times} within {self._policy.within_s:g} s"
        return Finding(verdict, "xid", text, subject, xid, at_s=at_s)

    def _count(self, at_s: float) -> int:
        """Incidents within the time, this one included."""
        if not self._incidents or at_s - self._incidents[-1] > self._policy.burst_s:
            self._incidents.append(at_s)
        self._incidents = [then for then in self._incidents if at_s - then <= self._policy.within_s]
        return len(self._incidents)


def _is_action(action: object) -> bool:
    return isinstance(action, Action) or action in {known.value for known in Action}
