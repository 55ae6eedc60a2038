"""NVML, the driver's own interface to its devices. This is the only place that touches ``pynvml``.

Rules that hold here:

*lazy*    ``pynvml`` is imported at the first call: machines without NVIDIA devices never need it.
*by UUID* CUDA and NVML count devices in different orders, so a device is only ever named by its UUID.
*absent*  What a driver is too old for, or a board does not have, reads as ``None``. Other failures raise.
*open*    Initialising is slow on big nodes. NVML counts who holds it: the first holder pays, and the last one closes.

A sick driver may answer late or never. A call then blocks its thread only, since ctypes releases the interpreter lock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_ntp.errors import HardwareError
from lightning_ntp.hardware.readings import (
    ABSENT,
    LOST,
    ClockReason,
    Code,
    Event,
    EventType,
    Field,
    PowerLimits,
    Temperature,
)

if TYPE_CHECKING:
    import torch


class NvmlError(HardwareError):
    """A call that the driver refused.

    Attributes:
        code: NVML's return code; see :class:`Code`.
    """

    def __init__(self, call: str, code: int, text: str, hint: str = "") -> None:
        super().__init__(f"{call}: {text} (NVML code {code}){hint}")
        self.code = code

    @property
    def is_lost(self) -> bool:
        """Whether the device has left for good, until it is reset, or is not there at all."""
        return self.code in LOST or self.code == Code.NOT_FOUND

    @property
    def is_absent(self) -> bool:
        """Whether this driver or board does not have what was asked for."""
        return self.code in ABSENT


def uuid_of(device: torch.device | int | str) -> str:
    """NVML's name of a CUDA device.

    Raises:
        HardwareError: if ``device`` is no CUDA device.
    """
    import torch

    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda":
        raise HardwareError(f"device={str(device)!r} has no UUID: only CUDA devices can be watched through NVML")
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


class Driver:
    """NVML, initialised. Use it as a context, or ``close`` it.

    Raises:
        HardwareError: if ``pynvml`` is missing.
        NvmlError: if there is no driver.
    """

    def __init__(self) -> None:
        self._pynvml = _import_pynvml()
        self.call("nvmlInit")
        self._is_open = True

    @staticmethod
    def check() -> None:
        """Raise what is wrong with the installation, without going to the driver.

        Raises:
            HardwareError: if ``pynvml`` is missing.
        """
        _import_pynvml()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give NVML back; a second time does nothing."""
        if self._is_open:
            self._is_open = False
            with suppress(NvmlError):  # nothing can be done about it, and it would hide why we close
                self.call("nvmlShutdown")

    def call(self, name: str, *arguments: Any) -> Any:
        """Call one of pynvml's functions.

        Raises:
            NvmlError: for every failure; ``FUNCTION_NOT_FOUND`` where pynvml or the driver is too old.
        """
        function = getattr(self._pynvml, name, None)
        if function is None:
            raise NvmlError(name, Code.FUNCTION_NOT_FOUND, "this pynvml is too old for it")
        try:
            return function(*arguments)
        except self._pynvml.NVMLError as error:
            raise NvmlError(name, error.value, str(error), _HINTS.get(error.value, "")) from None

    def read(self, name: str, *arguments: Any) -> Any:
        """As :meth:`call`, but ``None`` where driver or board do not have it."""
        try:
            return self.call(name, *arguments)
        except NvmlError as error:
            if error.is_absent:
                return None
            raise

    @property
    def version(self) -> str:
        """The driver's version, such as ``"570.86.10"``."""
        return self.call("nvmlSystemGetDriverVersion")

    def uuids(self) -> tuple[str, ...]:
        """All devices that answer, in NVML's order; lost ones are left out."""
        found = []
        for index in range(self.call("nvmlDeviceGetCount")):
            try:
                found.append(self.call("nvmlDeviceGetUUID", self.call("nvmlDeviceGetHandleByIndex", index)))
            except NvmlError as error:
                if not error.is_lost:
                    raise
        return tuple(found)


class Device:
    """One device of this machine. Use it as a context, or ``close`` it.

    Args:
        uuid: As :func:`uuid_of` gives it.

    Raises:
        HardwareError: if ``pynvml`` is missing.
        NvmlError: if there is no driver, no such device, or the device is lost.
    """

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.driver = Driver()
        try:
            self.handle = self.driver.call("nvmlDeviceGetHandleByUUID", uuid)
        except BaseException:
            self.driver.close()
            raise

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.driver.close()

    @property
    def name(self) -> str:
        return self.driver.call("nvmlDeviceGetName", self.handle)

    def fields(self, wanted: Sequence[Field | tuple[Field, int]]) -> list[int | float | None]:
        """Values of fields, all in one call of the driver; ``None`` for those that it does not have.

        Args:
            wanted: Fields, or pairs of a field and its scope.

        Raises:
            NvmlError: if the call fails, or the device is lost.
        """
        ids = [tuple(map(int, field)) if isinstance(field, tuple) else int(field) for field in wanted]
        answers = self._read("nvmlDeviceGetFieldValues", ids)
        if answers is None:
            return [None] * len(ids)
        for answer in answers:
            if answer.nvmlReturn in LOST:
                raise NvmlError("nvmlDeviceGetFieldValues", answer.nvmlReturn, f"field {answer.fieldId}")
        return [None if answer.nvmlReturn else _value(answer) for answer in answers]

    def link_is_up(self, link: int) -> bool | None:
        """State of one NVLink, for drivers without the field."""
        try:
            state = self._read("nvmlDeviceGetNvLinkState", link)
        except NvmlError as error:
            if error.is_lost:
                raise
            return None  # a link that the board does not have is an invalid argument to some drivers
        return None if state is None else bool(state)

    def clock_reasons(self) -> ClockReason | None:
        """Why the clocks are low."""
        reasons = self._read("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # its name before driver 535
            reasons = self._read("nvmlDeviceGetCurrentClocksThrottleReasons")
        return None if reasons is None else ClockReason(reasons)

    def temperature(self) -> Temperature:
        """How hot the GPU is."""
        celsius = self._read("nvmlDeviceGetTemperatureV", 0)
        if celsius is None:  # its name before driver 560
            celsius = self._read("nvmlDeviceGetTemperature", 0)
        return Temperature(celsius, self._read("nvmlDeviceGetMarginTemperature"))

    def power_limits(self) -> PowerLimits:
        """The limits that are set, hold, and are allowed."""
        lowest, highest = self._read("nvmlDeviceGetPowerManagementLimitConstraints") or (None, None)
        return PowerLimits(
            requested_mw=self._read("nvmlDeviceGetPowerManagementLimit"),
            enforced_mw=self._read("nvmlDeviceGetEnforcedPowerLimit"),
            default_mw=self._read("nvmlDeviceGetPowerManagementDefaultLimit"),
            lowest_mw=lowest,
            highest_mw=highest,
        )

    def power_usage_mw(self) -> int | None:
        """What the board draws, averaged over up to a second."""
        return self._read("nvmlDeviceGetPowerUsage")

    def set_power_limit(self, limit_mw: int) -> PowerLimits:
        """Set the limit, and read back what holds now: a limit from outside wins without a word.

        The setter's second version is not used: pynvml 13 drops its return code, so a refusal looks like success.

        Raises:
            NvmlError: without permission, out of range, or where the board cannot do it.
        """
        self.driver.call("nvmlDeviceSetPowerManagementLimit", self.handle, limit_mw)
        return self.power_limits()

    def _read(self, name: str, *arguments: Any) -> Any:
        return self.driver.read(name, self.handle, *arguments)


class EventSet:
    """The events of one device, from now on. Use it as a context, or ``close`` it before the device.

    Args:
        device: Whose.
        types: What to hear of. Those that driver and board do not have are left out, else none would be registered.

    Attributes:
        types: What is heard of; 0 if nothing: then do not wait.

    Raises:
        NvmlError: if the device is lost.
    """

    def __init__(self, device: Device, types: EventType) -> None:
        self._device = device
        supported = device.driver.read("nvmlDeviceGetSupportedEventTypes", device.handle) or 0
        self.types = types & supported
        self._set = device.driver.call("nvmlEventSetCreate")
        try:
            if self.types:
                device.driver.call("nvmlDeviceRegisterEvents", device.handle, int(self.types), self._set)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> EventSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, timeout_s: float) -> Event | None:
        """The next event, or ``None`` after ``timeout_s``.

        Raises:
            NvmlError: at once if the device is lost: do not call again.
        """
        try:
            event = self._device.driver.call("nvmlEventSetWait", self._set, max(0, round(timeout_s * 1000)))
        except NvmlError as error:
            if error.code == Code.TIMEOUT:
                return None
            raise
        # By address: a lost device can no longer be asked for its index or UUID.
        is_own = _address(event.device) == _address(self._device.handle)
        return Event(EventType(event.eventType), event.eventData, is_own)

    def close(self) -> None:
        with suppress(NvmlError):
            self._device.driver.call("nvmlEventSetFree", self._set)


_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # of a value, by its type
_HINTS = {
    Code.NO_PERMISSION: ": it needs root, in a container CAP_SYS_ADMIN as well",
    Code.NOT_FOUND: ": no such device here; UUIDs are what `nvidia-smi -L` lists",
    Code.DRIVER_NOT_LOADED: ": load the NVIDIA driver, or run without hardware watching",
    Code.LIBRARY_NOT_FOUND: ": no NVIDIA driver is installed; on machines without one there is nothing to watch",
}


def _import_pynvml() -> ModuleType:
    try:
        import pynvml
    except ImportError as error:
        raise HardwareError(
            "NVIDIA devices are watched through the module pynvml, which is missing: "
            "pip install 'nvidia-ml-py>=12.570.86', or run without hardware watching"
        ) from error
    return pynvml


def _value(answer: Any) -> int | float:
    """A field's value; its type says which member of the union holds it, the rest of the union may be anything."""
    member = _MEMBERS[answer.valueType] if answer.valueType < len(_MEMBERS) else "ullVal"
    return getattr(answer.value, member)


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
