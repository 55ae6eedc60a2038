"""The real pynvml on the fake driver: what reads, sets and events give, and what is missing reads as ``None``. D1."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pynvml
import pytest
import torch

from lightning_ntp.errors import HardwareError
from lightning_ntp.hardware.nvml import Device, Driver, EventSet, NvmlError, uuid_of
from lightning_ntp.hardware.readings import ClockReason, Code, EventType, Field, PowerLimits
from tests.fake_nvml import SOURCE, FakeDriver
from tests.unit.test_architecture import reachable, read_modules

pytest_plugins = ["tests.fake_nvml.fixtures"]


def test_a_device_is_opened_by_its_uuid(driver):
    driver.set(1, name="Fake B200")
    with Device(driver.uuid(1)) as device:
        assert device.name == "Fake B200"
        assert device.driver.version == "570.86.10"
        assert device.driver.uuids() == (driver.uuid(0), driver.uuid(1))
    with pytest.raises(NvmlError, match="no such device here; UUIDs are what `nvidia-smi -L` lists") as caught:
        Device("GPU-none")
    assert caught.value.is_lost


def test_lost_devices_are_left_out_of_the_list(driver):
    driver.set(0, lost=1)
    with Driver() as opened:
        assert opened.uuids() == (driver.uuid(1),)
    with pytest.raises(NvmlError) as caught:
        Device(driver.uuid(0))
    assert caught.value.is_lost and caught.value.code == Code.GPU_IS_LOST


def test_who_closes_leaves_it_open_for_others(driver):
    first, second = Device(driver.uuid(0)), Device(driver.uuid(1))
    first.close()
    first.close()
    assert second.name == "Fake GPU" and pynvml._nvmlLib_refcount == 1
    second.close()
    with pytest.raises(NvmlError):
        assert second.name


def test_without_pynvml_the_error_names_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for attempt in (Driver, Driver.check):
        with pytest.raises(HardwareError, match="pip install 'nvidia-ml-py>=12.570.86', or run without"):
            attempt()


def test_without_a_driver(driver):
    driver.set(init_ret=12)
    with pytest.raises(NvmlError, match="on machines without one there is nothing to watch") as caught:
        Driver()
    assert caught.value.code == Code.LIBRARY_NOT_FOUND


def test_all_fields_in_one_call_each_by_its_type(driver):
    driver.set(trace=1)
    driver.set(0, double_bit_ecc=2**33, recovery_action=4, nvlinks=4, others={"nvlink.2": 0, "field.144": 1})
    wanted = [Field.DOUBLE_BIT_ECC, Field.RECOVERY_ACTION, Field.REMAP_PENDING]
    wanted += [(Field.NVLINK_STATE, link) for link in range(6)]
    with Device(driver.uuid(0)) as device:
        assert device.fields(wanted) == [2**33, 4, 1, 1, 1, 0, 1, None, None]
    assert len(driver.calls("nvmlDeviceGetFieldValues")) == 1


def test_an_old_driver_reads_as_none(old_driver):
    old_driver.set(0, double_bit_ecc=3, clock_reasons=0x40, celsius=71)
    with Device(old_driver.uuid(0)) as device:
        assert device.fields([Field.RECOVERY_ACTION, (Field.NVLINK_STATE, 0), Field.DOUBLE_BIT_ECC]) == [None, None, 3]
        assert device.clock_reasons() == ClockReason.HW_THERMAL
        temperature = device.temperature()
        assert (temperature.celsius, temperature.margin_c) == (71, None)
        assert device.link_is_up(0) is True and device.link_is_up(40) is None


def test_what_a_board_does_not_have_reads_as_none_and_failures_raise(driver):
    functions = ("PowerManagementLimitConstraints", "EnforcedPowerLimit", "FieldValues", "NvLinkState")
    driver.set("*", {f"ret.nvmlDeviceGet{name}": Code.NOT_SUPPORTED for name in functions})
    with Device(driver.uuid(0)) as device:
        limits = device.power_limits()
        assert limits == PowerLimits(700_000, None, 700_000, None, None)
        assert device.fields([Field.REMAP_FAILED]) == [None]
        assert device.link_is_up(0) is None
        driver.set(0, {"ret.nvmlDeviceGetFieldValues": 999})
        with pytest.raises(NvmlError) as caught:
            device.fields([Field.REMAP_FAILED])
        assert caught.value.code == 999 and not caught.value.is_lost and not caught.value.is_absent


def test_a_function_that_this_pynvml_lacks_is_absent(driver, monkeypatch):
    monkeypatch.delattr(pynvml, "nvmlDeviceGetMarginTemperature")
    with Device(driver.uuid(0)) as device:
        assert device.temperature().margin_c is None


def test_temperature_and_power(driver):
    driver.set(0, celsius=83, margin_c=4, power_usage=412_000)
    with Device(driver.uuid(0)) as device:
        assert (device.temperature().celsius, device.temperature().margin_c) == (83, 4)
        assert device.power_usage_mw() == 412_000


def test_a_limit_is_read_back(driver):
    driver.set(0, power_outside=500_000, power_max=900_000)
    with Device(driver.uuid(0)) as device:
        assert device.set_power_limit(650_000).enforced_mw == 500_000, "the board controller's limit wins"
        driver.set(0, power_outside=900_000)
        limits = device.set_power_limit(800_000)
        assert (limits.requested_mw, limits.enforced_mw, limits.default_mw) == (800_000, 800_000, 700_000)
        for out_of_range in (100_000, 900_001):
            with pytest.raises(NvmlError):
                device.set_power_limit(out_of_range)
    assert driver.state()["gpu.0.power_limit"] == "800000"
    calls = driver.calls()
    assert [(call.function, call.gpu, call.first) for call in calls if not call.ret] == [
        ("nvmlDeviceSetPowerManagementLimit", 0, 650_000),
        ("nvmlDeviceSetPowerManagementLimit", 0, 800_000),
    ]


def test_a_limit_needs_permission(driver):
    driver.set(root=0)
    with Device(driver.uuid(0)) as device, pytest.raises(NvmlError, match="CAP_SYS_ADMIN") as caught:
        device.set_power_limit(650_000)
    assert caught.value.code == Code.NO_PERMISSION
    assert "gpu.0.power_limit" not in driver.state()


def test_events_come_from_registration_on_and_only_of_supported_types(driver):
    driver.set("*", event_types=int(EventType.XID))
    driver.xid(0, 13)
    with Device(driver.uuid(0)) as device, EventSet(device, EventType.XID | EventType.UNAVAILABLE) as events:
        assert events.types == EventType.XID
        driver.xid(1, 31)
        driver.event(0, EventType.UNAVAILABLE)
        assert events.wait(0.01) is None
        driver.xid(0, 79)
        driver.set(0, lost=1)
        event = events.wait(1.0)
        assert event.is_own and (event.type, event.data) == (EventType.XID, 79), "matched although it is lost"
        with pytest.raises(NvmlError) as caught:
            events.wait(5.0)
        assert caught.value.is_lost


def test_an_event_of_another_device_is_not_our_own(driver):
    with Device(driver.uuid(0)) as first, Device(driver.uuid(1)) as second, EventSet(first, EventType.XID) as events:
        first.driver.call("nvmlDeviceRegisterEvents", second.handle, int(EventType.XID), events._set)
        driver.xid(1, 79)
        assert not events.wait(1.0).is_own


def test_the_numbers_are_pynvmls():
    fields = {
        Field.DOUBLE_BIT_ECC: "ECC_DBE_VOL_TOTAL",
        Field.REMAP_PENDING: "REMAPPED_PENDING",
        Field.REMAP_FAILED: "REMAPPED_FAILURE",
        Field.NVLINK_STATE: "NVLINK_GET_STATE",
        Field.RECOVERY_ACTION: "GET_GPU_RECOVERY_ACTION",
    }
    events = {
        EventType.DOUBLE_BIT_ECC: "DoubleBitEccError",
        EventType.XID: "XidCriticalError",
        EventType.ECC_STORM: "SingleBitEccErrorStorm",
        EventType.DRAM_RETIREMENT: "DramRetirementEvent",
        EventType.DRAM_RETIREMENT_FAILURE: "DramRetirementFailure",
        EventType.POISON_CONTAINED: "NonFatalPoisonError",
        EventType.POISON_FATAL: "FatalPoisonError",
        EventType.UNAVAILABLE: "GpuUnavailableError",
        EventType.RECOVERY_ACTION: "GpuRecoveryAction",
    }
    reasons = {
        ClockReason.POWER_CAP: "SwPowerCap",
        ClockReason.HW_SLOWDOWN: "HwSlowdown",
        ClockReason.SW_THERMAL: "SwThermalSlowdown",
        ClockReason.HW_THERMAL: "HwThermalSlowdown",
        ClockReason.HW_POWER_BRAKE: "HwPowerBrakeSlowdown",
        ClockReason.BOARD_LIMIT: "BoardLimit",
        ClockReason.RELIABILITY: "Reliability",
    }
    assert set(fields) == set(Field) and set(events) == set(EventType) and set(reasons) == set(ClockReason)
    for prefix, numbers in (("NVML_FI_DEV_", fields), ("nvmlEventType", events), ("nvmlClocksThrottleReason", reasons)):
        assert [getattr(pynvml, prefix + name) for name in numbers.values()] == [int(number) for number in numbers]
    assert [getattr(pynvml, f"NVML_ERROR_{code.name}") for code in Code] == list(Code)


def test_cuda_devices_are_named_by_uuid(monkeypatch):
    properties = SimpleNamespace(uuid="fa4e0000-0000-0000-0000-000000000003")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for device in (0, "cuda:0", torch.device("cuda", 0)):
        assert uuid_of(device) == FakeDriver.uuid(3)
    with pytest.raises(HardwareError, match="device='cpu' has no UUID"):
        uuid_of("cpu")


def test_another_process_finds_the_driver_and_its_limit_outlives_it(driver):
    code = (
        "import os, pynvml; pynvml.nvmlInit(); h = pynvml.nvmlDeviceGetHandleByIndex(1);"
        "pynvml.nvmlDeviceSetPowerManagementLimit(h, 300000); os.abort()"
    )
    ended = subprocess.run([sys.executable, "-c", code], env={"PATH": "", **driver.environment()}, timeout=30)
    assert ended.returncode == -6
    with Device(driver.uuid(1)) as device:
        assert device.power_limits().requested_mw == 300_000


def test_pynvml_and_torch_stay_away_until_they_are_needed():
    modules = read_modules()
    for name in ("health", "detectors", "xids", "findings", "probe"):
        imports = {i for m in reachable(modules[f"lightning_ntp.hardware.{name}"], modules) for i in modules[m].imports}
        assert not [i for i in imports if i.startswith(("torch.", "lightning."))]
    code = (
        "import sys, importlib.util as u, types; p = types.ModuleType('lightning_ntp');"
        "p.__path__ = ['lightning_ntp']; sys.modules['lightning_ntp'] = p;"
        "import lightning_ntp.hardware.health, lightning_ntp.hardware.detectors;"
        "print(sorted({'torch', 'pynvml', 'lightning'} & set(sys.modules)))"
    )
    root = SOURCE.parents[2]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True, timeout=30)
    assert out.stdout.strip() == "[]"


@pytest.mark.slow  # it asks a package registry, which not every machine reaches
def test_entry_points_have_nvidias_signatures(compiler, tmp_path):
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path)]
    if subprocess.run([*download, "nvidia-nvml-dev"], capture_output=True, timeout=120).returncode:
        pytest.skip("nvidia-nvml-dev cannot be downloaded here")
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(tmp_path)], check=True)
    (header,) = tmp_path.rglob("nvml.h")
    options = ["-std=gnu11", "-Wall", "-Wextra", "-Wno-enum-conversion", "-Werror", "-fsyntax-only"]
    command = [compiler, "-DFAKE_NVML_ABI_CHECK", f"-I{header.parent}", *options]
    subprocess.run([*command, str(SOURCE)], check=True)
    wrong = tmp_path / "wrong.c"
    wrong.write_text(SOURCE.read_text().replace("Device device, unsigned mw)", "Device device, int mw)"))
    assert subprocess.run([*command, str(wrong)], capture_output=True).returncode, "the header was not looked at"
