"""The health monitor: one daemon thread that watches the device of its own process.

It waits for the driver's events and, once a second, asks the device how it is. What the driver announces is known in
milliseconds; what it does not announce, within the second. A lost device is told once, and the thread ends: the driver
would answer every further call at once, and a loop would spin. A driver that no longer answers leaves the thread stuck
in a call; another thread sees that by the heartbeat.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from lightning_ntp.hardware.findings import Finding, Once, Verdict
from lightning_ntp.hardware.nvml import Device, Driver, EventSet, NvmlError
from lightning_ntp.hardware.probe import DeviceState, Slowdown, judge, read_state
from lightning_ntp.hardware.readings import Code, Event, EventType
from lightning_ntp.hardware.xids import XidHistory, XidPolicy

log = logging.getLogger(__name__)

EVENTS: Mapping[EventType, tuple[Verdict, str]] = {
    EventType.ECC_STORM: (Verdict.NOTE, "many single-bit ECC errors"),
    EventType.DRAM_RETIREMENT: (Verdict.NOTE, "memory was retired"),
    EventType.DRAM_RETIREMENT_FAILURE: (Verdict.LEAVE, "memory could not be retired: the board has to be replaced"),
    EventType.POISON_CONTAINED: (Verdict.NOTE, "a contained memory error"),
    EventType.POISON_FATAL: (Verdict.LOST, "an uncontained memory error"),
    EventType.UNAVAILABLE: (Verdict.LOST, "the device is unavailable"),
}
"""What events other than XIDs mean by themselves. All events, these too, have the device asked at once."""

OPENING_S = 60.0
"""How long opening the driver may take: without persistence mode it starts all devices of the node."""

_ASKED = EventType.XID | EventType.DOUBLE_BIT_ECC | EventType.RECOVERY_ACTION
_SLICE_S = 0.25  # of a wait, so that stopping is quick
_LEAST_S = 0.05  # between two probes, or a storm of events would keep the driver busy


class HealthMonitor:
    """Watches one device.

    Args:
        uuid: Of the device; see :func:`lightning_ntp.hardware.nvml.uuid_of`.
        on_finding: Gets each finding, in the monitor's thread.
        policy: What XIDs mean.
        seen: When application errors have happened on this device before, on the machine's monotonic clock: a process
            that was started again knows them only from whoever started it.
        probe_s: Time between two questions.
        slow_s: How long the hardware has to lower the clocks before it is found.
        clock: Times application errors.

    Attributes:
        cpu_s: CPU time of the thread.
    """

    def __init__(
        self,
        uuid: str,
        on_finding: Callable[[Finding], object],
        *,
        policy: XidPolicy | None = None,
        seen: Iterable[float] = (),
        probe_s: float = 1.0,
        slow_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.uuid, self.cpu_s = uuid, 0.0
        self._on_finding, self._once = on_finding, Once(self._hand_on)
        self._xids = XidHistory(policy or XidPolicy(), seen)
        self._slowdown = Slowdown(slow_s)
        self._probe_s, self._clock = probe_s, clock
        self._start: DeviceState | None = None
        self._is_opening = True
        self._entered_s: float | None = None  # when the thread went to the driver, if it is there
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ntp-health", daemon=True)

    def start(self) -> None:
        """Begin; returns at once.

        Raises:
            HardwareError: if ``pynvml`` is missing. That there is no driver comes as a note.
        """
        Driver.check()
        self._entered_s = time.monotonic()
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the thread; one that is stuck in the driver is left to itself."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    @property
    def is_watching(self) -> bool:
        """Whether the thread lives: it ends when the device is lost, or there is no driver."""
        return self._thread.is_alive()

    def is_wedged(self, limit_s: float = 10.0) -> bool:
        """Whether the driver has kept the thread for longer than ``limit_s``. Ask from another thread.

        Args:
            limit_s: Well above a quarter of a second, as the driver keeps the thread so long while all is well.
        """
        entered_s = self._entered_s
        limit_s = max(limit_s, OPENING_S) if self._is_opening else limit_s
        return entered_s is not None and time.monotonic() - entered_s > limit_s

    def find_wedge(self, limit_s: float = 10.0) -> Finding | None:
        """:meth:`is_wedged` as a detector."""
        if not self.is_wedged(limit_s):
            return None
        text = f"the driver has not answered for {limit_s:g} s"
        return Finding(Verdict.LOST, "heartbeat", text, self.uuid, at_s=time.monotonic())

    def _run(self) -> None:
        try:
            self._watch_until_stopped()
        except Exception as error:  # a bug of ours must not pass for a wedged driver
            log.exception("the health monitor has failed")
            text = f"health is watched no more: {type(error).__name__}: {error}"
            self._once.tell(Finding(Verdict.NOTE, "driver", text, self.uuid, at_s=time.monotonic()))
        finally:
            self._entered_s = None
            self.cpu_s = time.thread_time()

    def _watch_until_stopped(self) -> None:
        while not self._stopped.is_set():
            try:
                self._entered_s = time.monotonic()
                with Device(self.uuid) as device:
                    self._watch(device)
            except NvmlError as error:
                if self._is_over(error):
                    return
            self._entered_s = None
            self._stopped.wait(self._probe_s)  # a driver that fails at once must not have the thread spin

    def _hand_on(self, finding: Finding) -> None:
        self._entered_s = None  # the time that is spent in there is not the driver's
        try:
            self._on_finding(finding)
        finally:
            self._entered_s = time.monotonic()

    def _is_over(self, error: NvmlError) -> bool:
        """Tell of an error; returns whether trying again is of no use."""
        verdict, text = (Verdict.LOST, "") if error.is_lost else (Verdict.NOTE, "health cannot be watched: ")
        self._once.tell(Finding(verdict, "driver", f"{text}{error}", self.uuid, at_s=time.monotonic()))
        return error.is_lost or error.code == Code.LIBRARY_NOT_FOUND

    def _watch(self, device: Device) -> None:
        with EventSet(device, _ASKED | EventType(sum(EVENTS))) as events:  # first, so that nothing falls in between
            if self._start is None:
                self._start = read_state(device)
            self._is_opening = False
            probed_s, due_s = float("-inf"), 0.0
            while not self._stopped.is_set():
                now_s = self._entered_s = time.monotonic()
                if now_s >= due_s:
                    self._probe(device)
                    probed_s, due_s = now_s, now_s + self._probe_s
                self.cpu_s = time.thread_time()
                event = self._wait(events, min(_SLICE_S, due_s - now_s))
                if event is not None and event.is_own:
                    self._take(event)
                    due_s = min(due_s, probed_s + _LEAST_S)

    def _wait(self, events: EventSet, timeout_s: float) -> Event | None:
        if events.types:
            return events.wait(timeout_s)
        self._stopped.wait(timeout_s)  # a board without events
        return None

    def _take(self, event: Event) -> None:
        """What an event says by itself."""
        now_s = time.monotonic()
        if event.type == EventType.XID:
            self._once.tell(self._xids.judge(event.data, self._clock(), self.uuid))
        elif event.type == EventType.DOUBLE_BIT_ECC:
            knows_actions = self._start is not None and self._start.recovery_action is not None
            verdict = Verdict.DEGRADED if knows_actions else Verdict.LOST
            self._once.tell(Finding(verdict, "event", "a double-bit ECC error", self.uuid, at_s=now_s))
        elif event.type in EVENTS:
            verdict, text = EVENTS[event.type]
            self._once.tell(Finding(verdict, "event", text, self.uuid, at_s=now_s))

    def _probe(self, device: Device) -> None:
        state, now_s = read_state(device, self._start.links_up), time.monotonic()
        slow = self._slowdown.add(state.clock_reasons, now_s, self.uuid)
        self._once.settle((*judge(state, self._start, self.uuid), *slow), now_s)
