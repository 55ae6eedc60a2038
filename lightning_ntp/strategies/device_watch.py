"""What becomes of a member whose device is found to be unwell.

A lost device ends its member at once, as the main thread may be stuck in a kernel that never ends: the others see a
death and go on. One that still works but will not for long has the member hand over its part at the next step. What is
only slow, or worth a note, is logged. Callbacks hear of everything at the next step, in the main thread.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

import torch

from lightning_ntp.engine.survivor import Survivor
from lightning_ntp.errors import HardwareError
from lightning_ntp.hardware.detectors import DetectorLoop
from lightning_ntp.hardware.findings import Finding, Verdict
from lightning_ntp.hardware.health import HealthMonitor
from lightning_ntp.hardware.nvml import uuid_of
from lightning_ntp.hardware.xids import XidPolicy

log = logging.getLogger(__name__)

UUID_VARIABLE = "NTP_DEVICE_UUID"
"""Names the device of a member on CPU, for tests on a simulated driver."""

Check = Callable[[], Finding | bool | None]


class DeviceWatch:
    """Watches this process's device, from when it joins until it ends.

    Args:
        survivor: The member.
        device: Its device; only CUDA devices are watched through NVML.
        detectors: The user's own checks, see :mod:`lightning_ntp.hardware.detectors`; also on CPU.
        policy: What XIDs mean.
        end_member: Ends the process as a lost member; never returns.
    """

    def __init__(
        self,
        survivor: Survivor,
        device: torch.device,
        detectors: Sequence[Check],
        policy: XidPolicy,
        end_member: Callable[[], None],
    ) -> None:
        self._survivor, self._end_member = survivor, end_member
        self._told: SimpleQueue[Finding] = SimpleQueue()
        self._monitor = self._start_monitor(device, policy)
        checks = [*detectors, *([self._monitor.find_wedge] if self._monitor else [])]
        self._loop = DetectorLoop(checks, self._take) if checks else None
        if self._loop is not None:
            self._loop.start()
        survivor.before_step.append(self._tell)

    def stop(self) -> None:
        """End the threads."""
        for thread in (self._loop, self._monitor):
            if thread is not None:
                thread.stop()

    def _start_monitor(self, device: torch.device, policy: XidPolicy) -> HealthMonitor | None:
        uuid = uuid_of(device) if device.type == "cuda" else os.environ.get(UUID_VARIABLE)
        if not uuid:
            return None
        monitor = HealthMonitor(uuid, self._take, policy=policy)
        try:
            monitor.start()
        except HardwareError as error:
            log.warning("%s: its health is not watched: %s", self._survivor.membership.seat, error)
            return None
        return monitor

    def _take(self, finding: Finding) -> None:
        """In a thread of the watch."""
        seat = self._survivor.membership.seat
        self._told.put(finding)
        if finding.verdict is Verdict.LOST:
            log.error("%s ends: %s", seat, finding)
            self._end_member()
        elif finding.verdict is Verdict.LEAVE:
            log.error("%s will hand over its part and leave: %s", seat, finding)
            self._survivor.wants_to_leave = True
        else:
            log.log(logging.INFO if finding.verdict is Verdict.NOTE else logging.WARNING, "%s: %s", seat, finding)

    def _tell(self, step: int) -> None:
        """In the main thread, before each run of a step."""
        while True:
            try:
                finding = self._told.get_nowait()
            except Empty:
                return
            for observer in self._survivor.observers:
                observer.on_finding(finding)

