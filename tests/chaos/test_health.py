"""A member whose device is found to be unwell, in a real training: on the real pynvml, over a scripted driver."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pynvml
import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_ntp.hardware.findings import Verdict
from lightning_ntp.membership.exits import ExitCode
from lightning_ntp.strategies import process
from lightning_ntp.strategies.device_watch import UUID_VARIABLE
from tests.chaos.checks import check_trial
from tests.chaos.parity import Dense
from tests.chaos.test_leaving import CASE
from tests.fake_nvml import FakeDriver
from tests.lightning.survive_runs import Outcome, Trial

pytest_plugins = ["tests.fake_nvml.fixtures"]

VICTIM, STEP = "r1.s1", 3


@pytest.fixture(scope="module")
def dense() -> Dense:
    return Dense.of(CASE)


class Strikes(Callback):
    """In step ``STEP`` something happens to the victim's device; the victim waits for what comes of it."""

    def __init__(self, strike: Callable[[], None]) -> None:
        self._strike = strike

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *_: object) -> None:
        if trainer.global_step == STEP and os.environ["NTP_SEAT"] == VICTIM:
            self._strike()
            survivor, until = process.ProcessMember.current, time.monotonic() + 10.0
            while not survivor.wants_to_leave and time.monotonic() < until:
                time.sleep(0.01)


def members_device(driver: FakeDriver, strike: Callable[[int], None]) -> list[Callback]:
    """To be called in a member: gives it the device of its rank."""
    gpu = int(os.environ["RANK"])
    os.environ |= {**driver.environment(), UUID_VARIABLE: driver.uuid(gpu)}
    pynvml.nvmlLib = ctypes.CDLL(str(driver.library))
    return [Strikes(partial(strike, gpu))]


def falls_off_the_bus(driver: FakeDriver, gpu: int) -> None:
    driver.xid(gpu, 79)
    driver.set(gpu, lost=1)


def cannot_remap_a_row(driver: FakeDriver, gpu: int) -> None:
    driver.set(gpu, remap_failed=1)


def run(workers, library: Path, folder: Path, strike: Callable[[FakeDriver, int], None], dense: Dense) -> Outcome:
    driver = FakeDriver(library, folder)
    driver.set(count=6)
    callbacks = partial(members_device, driver, partial(strike, driver))
    outcome = check_trial(workers, Trial(CASE, callbacks=callbacks), {VICTIM}, dense)
    assert not driver.calls("nvmlDeviceSetPowerManagementLimit"), "who watches sets nothing"
    return outcome


def test_a_device_that_is_lost_ends_its_member(workers, fake_library, tmp_path, dense):
    """D3: XID 79. The replica goes on at a lower degree, with parity."""
    outcome = run(workers, fake_library, tmp_path, falls_off_the_bus, dense)
    assert outcome.codes[VICTIM] == ExitCode.MEMBER_LOST
    hooks = [name for _, name, _ in outcome.reports["r0.s0.0"].told]
    assert "on_ntp_failure" in hooks and "on_ntp_recovered" in hooks


def test_a_device_that_will_not_last_is_left_in_good_order(workers, fake_library, tmp_path, dense):
    """D3: a row that could not be remapped. The member hands over, and no step is run again."""
    outcome = run(workers, fake_library, tmp_path, cannot_remap_a_row, dense)
    assert outcome.codes[VICTIM] == ExitCode.DRAINED
    assert not any(name == "on_ntp_failure" for report in outcome.reports.values() for _, name, _ in report.told)
    found = [event for _, name, event in outcome.reports[f"{VICTIM}.0"].told if name == "on_ntp_finding"]
    assert any(finding.verdict is Verdict.LEAVE and finding.source == "remap" for finding in found)


def fails_at_the_victim() -> bool:
    """A user's own check."""
    return os.environ["NTP_SEAT"] != VICTIM


def test_a_users_check_has_the_member_leave(workers, dense):
    case = replace(CASE, strategy={**CASE.strategy, "detectors": [fails_at_the_victim]})
    callbacks = partial(list, [Strikes(time.time)])
    outcome = check_trial(workers, Trial(case, callbacks=callbacks), {VICTIM}, dense)
    assert outcome.codes[VICTIM] == ExitCode.DRAINED
