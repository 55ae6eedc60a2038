"""Asks a device how it is, and judges the answer.

The evidence in its order: a device that is lost; what the driver wants done (its recovery action, since driver 570);
new double-bit ECC errors, which end it only where the driver knows no recovery action; memory rows that could not be
remapped, or wait for it; NVLinks that went down. :func:`judge` is pure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lightning_ntp.hardware.findings import Finding, Verdict
from lightning_ntp.hardware.nvml import Device, NvmlError
from lightning_ntp.hardware.readings import MOST_LINKS, ClockReason, Code, Field

RECOVERY_ACTIONS: Mapping[int, tuple[Verdict, str]] = {
    1: (Verdict.LOST, "reset the GPU"),
    2: (Verdict.LOST, "reboot the node"),
    3: (Verdict.LEAVE, "end all that talks to the GPU peer to peer"),
    4: (Verdict.LEAVE, "finish what runs, then reset the GPU"),
    5: (Verdict.DEGRADED, "recover the IMEX domain"),
    6: (Verdict.LOST, "reset the bus"),
    7: (Verdict.LOST, "reboot the system"),
}
"""What the driver wants done, by NVIDIA's guide to memory errors; one that is not listed counts as lost."""

SLOWDOWNS = ClockReason.HW_SLOWDOWN | ClockReason.HW_THERMAL | ClockReason.HW_POWER_BRAKE
"""Reasons for which the hardware itself lowers the clocks; a power limit is none of them."""

_FIELDS = (Field.RECOVERY_ACTION, Field.DOUBLE_BIT_ECC, Field.REMAP_PENDING, Field.REMAP_FAILED)
_LINK_UP = (1, 2)  # active, or asleep


@dataclass(frozen=True)
class DeviceState:
    """What a device said of itself; ``None`` for what driver or board do not tell.

    Attributes:
        recovery_action: What the driver wants done; 0 for nothing.
        double_bit_ecc: Uncorrectable memory errors since the driver was loaded.
        remap_pending: Whether memory rows wait for a reset to be remapped. Running work does not suffer.
        remap_failed: Whether rows could not be remapped: the board has to be replaced.
        links_up: The NVLinks that are up.
        clock_reasons: Why the clocks are low.
    """

    recovery_action: int | None = None
    double_bit_ecc: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    links_up: frozenset[int] = frozenset()
    clock_reasons: ClockReason | None = None


def read_state(device: Device, links: frozenset[int] = frozenset(range(MOST_LINKS))) -> DeviceState:
    """Ask for everything: one call for all fields, and one for the clocks.

    Args:
        device: Whom.
        links: The NVLinks to look at. Give those that were up at the start: a board without the others is no finding.

    Raises:
        NvmlError: if the device is lost, or the driver fails.
    """
    order = sorted(links)
    values = device.fields([*_FIELDS, *((Field.NVLINK_STATE, link) for link in order)])
    action, ecc, pending, failed = values[: len(_FIELDS)]
    states = zip(order, values[len(_FIELDS) :], strict=True)
    return DeviceState(
        recovery_action=action,
        double_bit_ecc=ecc,
        remap_pending=None if pending is None else bool(pending),
        remap_failed=None if failed is None else bool(failed),
        links_up=frozenset(link for link, state in states if _is_up(device, link, state)),
        clock_reasons=device.clock_reasons(),
    )


def judge(state: DeviceState, start: DeviceState, subject: str = "") -> tuple[Finding, ...]:
    """What a state means, seen against the one at the start."""
    return tuple(Finding(verdict, source, text, subject) for verdict, source, text in _judge(state, start))


def is_healthy(uuid: str, limit_s: float = 10.0) -> bool:
    """Whether a process may be started on a device: it answers, and nothing says that it should leave a job.

    Args:
        uuid: Of the device.
        limit_s: A driver that has not answered by then is stuck, and the device not healthy.

    Raises:
        HardwareError: if ``pynvml`` is missing, or no driver installed.
    """
    return not any(finding.verdict in (Verdict.LOST, Verdict.LEAVE) for finding in look(uuid, limit_s))


def look(uuid: str, limit_s: float = 10.0) -> tuple[Finding, ...]:
    """All that there is to say of a device right now, in at most ``limit_s``.

    Raises:
        HardwareError: as :func:`is_healthy`.
    """
    answers: list[tuple[Finding, ...] | Exception] = []
    thread = threading.Thread(target=lambda: answers.append(_look(uuid)), name="ntp-probe", daemon=True)
    thread.start()  # a thread of its own, as a sick driver never answers
    thread.join(limit_s)
    if not answers:
        return (Finding(Verdict.LOST, "driver", f"it has not answered for {limit_s:g} s", uuid, at_s=time.monotonic()),)
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


def _look(uuid: str) -> tuple[Finding, ...] | Exception:
    try:
        with Device(uuid) as device:
            return judge(read_state(device), DeviceState(), uuid)
    except NvmlError as error:
        if error.code == Code.LIBRARY_NOT_FOUND:
            return error
        return (Finding(Verdict.LOST, "driver", str(error), uuid, at_s=time.monotonic()),)
    except Exception as error:
        return error


def _judge(state: DeviceState, start: DeviceState) -> Iterator[tuple[Verdict, str, str]]:
    action = state.recovery_action
    if action:
        verdict, wish = RECOVERY_ACTIONS.get(action, (Verdict.LOST, "unknown"))
        yield verdict, "recovery action", f"the driver wants recovery action {action}: {wish}"
    errors = (state.double_bit_ecc or 0) - (start.double_bit_ecc or 0)
    if errors > 0:
        # Contained where the driver knows of recovery actions and wants none; older ones leave it to us.
        verdict = Verdict.LOST if action is None else Verdict.DEGRADED
        since = "the driver was loaded" if start.double_bit_ecc is None else "the start"
        yield verdict, "ecc", f"double-bit ECC errors since {since}: {errors}"
    if state.remap_failed:
        yield Verdict.LEAVE, "remap", "memory rows could not be remapped: the board has to be replaced"
    elif state.remap_pending:
        yield Verdict.NOTE, "remap", "memory rows wait for a reset to be remapped"
    for link in sorted(start.links_up - state.links_up):
        yield Verdict.DEGRADED, "nvlink", f"NVLink {link} is down"


def _is_up(device: Device, link: int, state: int | float | None) -> bool:
    return bool(device.link_is_up(link)) if state is None else state in _LINK_UP


class Slowdown:
    """Tells a hardware slowdown that lasts from one that comes and goes.

    Args:
        limit_s: How long the clocks have to be lowered before it counts, and be free before it is over.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._is_slow = False
        self._text = ""
        self._turned_s: float | None = None

    def add(self, reasons: ClockReason | None, at_s: float, subject: str = "") -> tuple[Finding, ...]:
        """One look at the clocks; returns the finding while the slowdown lasts."""
        bits = (reasons or ClockReason(0)) & SLOWDOWNS
        if bool(bits) == self._is_slow:
            self._turned_s = None
        else:
            self._turned_s = at_s if self._turned_s is None else self._turned_s
            if at_s - self._turned_s >= self._limit_s:
                self._is_slow, self._turned_s = not self._is_slow, None
                self._text = f"the hardware has lowered the clocks for {self._limit_s:g} s: {_names(bits)}"
        return (Finding(Verdict.DEGRADED, "throttle", self._text, subject),) if self._is_slow else ()


def _names(bits: ClockReason) -> str:
    return ", ".join(reason.name.lower().replace("_", " ") for reason in bits)
