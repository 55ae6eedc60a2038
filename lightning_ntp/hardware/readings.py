"""What the driver can be asked, and what it answers: ids, bits and readings. Pure: no driver, no ``pynvml``.

The numbers are those of NVIDIA's header ``nvml.h``. They stand here, and not only in ``pynvml``, since that may be
older than the driver.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag

MOST_LINKS = 36
"""NVLinks that a device can have, by NVIDIA's header."""


class Code(IntEnum):
    """The return codes that are told apart."""

    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16


ABSENT = frozenset({Code.NOT_SUPPORTED, Code.FUNCTION_NOT_FOUND})
LOST = frozenset({Code.GPU_IS_LOST, Code.RESET_REQUIRED})


class Field(IntEnum):
    """Ids for :meth:`Device.fields`."""

    DOUBLE_BIT_ECC = 4  # volatile: since the driver was loaded
    REMAP_PENDING = 144
    REMAP_FAILED = 145
    NVLINK_STATE = 165  # its scope is the link
    RECOVERY_ACTION = 230  # since driver 570


class EventType(IntFlag):
    """Bits of events. Those from ``ECC_STORM`` on came with driver 570."""

    DOUBLE_BIT_ECC = 0x2
    XID = 0x8
    ECC_STORM = 0x200  # of single-bit errors
    DRAM_RETIREMENT = 0x400
    DRAM_RETIREMENT_FAILURE = 0x800
    POISON_CONTAINED = 0x1000
    POISON_FATAL = 0x2000
    UNAVAILABLE = 0x4000
    RECOVERY_ACTION = 0x8000


class ClockReason(IntFlag):
    """Why the clocks are lower than they could be."""

    POWER_CAP = 0x4  # the power limit: normal under load
    HW_SLOWDOWN = 0x8
    SW_THERMAL = 0x20
    HW_THERMAL = 0x40
    HW_POWER_BRAKE = 0x80
    BOARD_LIMIT = 0x200
    RELIABILITY = 0x400


@dataclass(frozen=True)
class Event:
    """Something the driver has announced.

    Attributes:
        type: Its bit.
        data: The number of an XID; 999 for one that is unknown.
        is_own: Whether it is about the device that was asked.
    """

    type: EventType
    data: int
    is_own: bool


@dataclass(frozen=True)
class PowerLimits:
    """Power limits in milliwatts; ``None`` where the board does not tell.

    Attributes:
        requested_mw: What was set last.
        enforced_mw: What holds: the lowest of that and limits from outside, such as the board controller's.
        default_mw: The maker's.
        lowest_mw: Least that may be set.
        highest_mw: Most that may be set.
    """

    requested_mw: int | None
    enforced_mw: int | None
    default_mw: int | None
    lowest_mw: int | None
    highest_mw: int | None


@dataclass(frozen=True)
class Temperature:
    """How hot a device is.

    Attributes:
        celsius: Of the GPU.
        margin_c: Degrees left until it slows down; ``None`` before driver 570.
    """

    celsius: int | None
    margin_c: int | None
