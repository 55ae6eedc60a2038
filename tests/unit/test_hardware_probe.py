"""One look at a device, before a process is started on it again; and slowdowns that last."""

from __future__ import annotations

import sys
import time

import pytest

from lightning_ntp.errors import HardwareError
from lightning_ntp.hardware.findings import Finding, Verdict
from lightning_ntp.hardware.probe import DeviceState, Slowdown, is_healthy, judge, look
from lightning_ntp.hardware.readings import ClockReason

pytest_plugins = ["tests.fake_nvml.fixtures"]


@pytest.mark.parametrize(
    ("keys", "healthy"),
    [
        ({}, True),
        ({"remap_pending": 1}, True),
        ({"recovery_action": 5}, True),
        ({"double_bit_ecc": 3}, True),  # the driver knows of recovery actions, and wants none
        ({"double_bit_ecc": 3, "field.230": -1}, False),
        ({"recovery_action": 1}, False),
        ({"recovery_action": 4}, False),
        ({"remap_failed": 1}, False),
        ({"lost": 1}, False),
        ({"ret.nvmlDeviceGetFieldValues": 999}, False),
        ({"init_ret": 9}, False),
    ],
)
def test_whether_a_process_may_be_started(driver, keys, healthy):
    driver.set(None if "init_ret" in keys else 0, keys)
    assert is_healthy(driver.uuid(0)) is healthy
    driver.change({name: 0 for name in driver.state() if name.startswith("gpu.0.")} | {"init_ret": 0})
    assert is_healthy(driver.uuid(0)), "once it is repaired"


def test_a_look_says_what_it_has_seen(driver):
    driver.set(0, remap_pending=1, double_bit_ecc=2)
    assert [str(finding) for finding in look(driver.uuid(0))] == [
        f"{driver.uuid(0)}: degraded: double-bit ECC errors since the driver was loaded: 2",
        f"{driver.uuid(0)}: note: memory rows wait for a reset to be remapped",
    ]


def test_a_device_that_is_gone_is_not_healthy(driver):
    assert not is_healthy(driver.uuid(5))


def test_a_driver_that_does_not_answer_is_not_healthy(driver):
    driver.set(0, {"hang.nvmlDeviceGetFieldValues": 700})
    start_s = time.monotonic()
    (found,) = look(driver.uuid(0), limit_s=0.2)
    assert time.monotonic() - start_s < 0.6
    assert found.verdict is Verdict.LOST and found.text == "it has not answered for 0.2 s"
    time.sleep(0.8)  # the stuck call ends, and closes NVML


def test_nothing_can_be_said_without_a_driver_or_pynvml(driver, monkeypatch):
    driver.set(init_ret=12)
    with pytest.raises(HardwareError, match="no NVIDIA driver is installed"):
        is_healthy(driver.uuid(0))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(HardwareError, match="pip install"):
        is_healthy(driver.uuid(0))


def test_the_state_is_seen_against_the_start():
    start = DeviceState(0, 5, False, False, frozenset({0, 1}), None)
    assert judge(start, start) == ()
    later = DeviceState(0, 6, True, False, frozenset({1, 2}), None)
    assert judge(later, start, "GPU-1") == (
        Finding(Verdict.DEGRADED, "ecc", "double-bit ECC errors since the start: 1", "GPU-1"),
        Finding(Verdict.NOTE, "remap", "memory rows wait for a reset to be remapped", "GPU-1"),
        Finding(Verdict.DEGRADED, "nvlink", "NVLink 0 is down", "GPU-1"),
    )
    assert judge(DeviceState(), DeviceState()) == ()


def test_only_a_slowdown_that_lasts_is_found():
    slowdown = Slowdown(30.0)
    hot, capped = ClockReason.HW_THERMAL | ClockReason.POWER_CAP, ClockReason.POWER_CAP
    seen = [bool(slowdown.add(hot if at_s % 20 else capped, at_s)) for at_s in range(200)]
    assert not any(seen), "it comes and goes"
    assert not slowdown.add(capped, 300.0) and not slowdown.add(None, 400.0), "a power limit is no fault"
    seen = [bool(slowdown.add(hot, at_s)) for at_s in range(1000, 1040)]
    assert seen.index(True) == 30 and all(seen[30:])
    (found,) = slowdown.add(capped, 1041.0)
    assert found.text == "the hardware has lowered the clocks for 30 s: hw thermal"
    assert slowdown.add(capped, 1070.0) and slowdown.add(hot, 1071.0), "it is over after 30 s without"
    assert slowdown.add(capped, 1080.0) and not slowdown.add(capped, 1110.0)
