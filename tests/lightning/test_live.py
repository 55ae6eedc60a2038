"""An ordinary script whose members die, come back, fail or are stopped: what its user sees.

B7, B8 and B9. Most jobs are forked members; the real script under its launchers is dear, five seconds of imports a
process.
"""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_ntp.membership.exits import ExitCode
from tests.lightning import live_fit
from tests.lightning.live_fit import STEPS, Options
from tests.lightning.live_members import Play, Played, play
from tests.support.launched import Launched, launched, until

SCRIPT = live_fit.__file__
STOPPED_EPOCH = 5
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node")


def fit(degrees: tuple[int, ...], words: list[str]) -> None:
    live_fit.main(".", Options.parse([f"degrees={','.join(map(str, degrees))}", *words]))


def fit_dense(rank: int, world_size: int, store_address: str, *words: str) -> None:
    del os.environ["RANK"]
    live_fit.main(".", Options.parse(["degrees=", *words]))


@pytest.fixture(scope="module")
def undisturbed(workers, tmp_path_factory) -> Path:
    """Folder of the same training in one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    workers.run(fit_dense, 1, cwd=folder)
    told = told_by(folder, "dense")
    assert told["stopped_epoch"] == STOPPED_EPOCH and told["best"].endswith("epoch=3-step=16.ckpt")
    return folder


def run(workers, folder: Path, *words: str, faults: str = "", **options: Any) -> Played:
    job = Play(fit, faults=faults, arguments=(list(words),), **options)
    return workers.run(play, 1, job, cwd=folder, timeout_s=180)[0]


# What it leaves


def rows_of(folder: Path) -> list[dict[str, float]]:
    [path] = folder.glob("csv/*/metrics.csv")
    with path.open(newline="") as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


def curves_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every scalar, as TensorBoard reads the folder."""
    [version] = folder.glob("tensorboard/*")
    events = EventAccumulator(str(version)).Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def told_by(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


def assert_like(folder: Path, undisturbed: Path) -> None:
    """Every row once, one continuous curve, and the same files."""
    for ours, theirs in zip(rows_of(folder), rows_of(undisturbed), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9), theirs
    ours, theirs = curves_of(folder), curves_of(undisturbed)
    assert ours.keys() == theirs.keys()
    for tag, points in theirs.items():
        assert [step for step, _ in ours[tag]] == [step for step, _ in points], tag
        assert [value for _, value in ours[tag]] == pytest.approx([value for _, value in points], rel=1e-6), tag
    files, expected = (each / "csv/version_0/checkpoints" for each in (folder, undisturbed))
    names = sorted(path.name for path in files.iterdir())
    assert names == sorted(path.name for path in expected.iterdir())
    for name in names:
        mine, dense = torch.load(files / name), torch.load(expected / name)
        assert mine["global_step"] == dense["global_step"]
        for key, value in dense["state_dict"].items():
            torch.testing.assert_close(mine["state_dict"][key], value, rtol=1e-9, atol=1e-9)


def assert_decided_alike(folder: Path, undisturbed: Path, *names: str) -> None:
    """ModelCheckpoint and EarlyStopping of these processes have decided as in the undisturbed run."""
    expected = told_by(undisturbed, "dense")
    for name in names:
        told = told_by(folder, name)
        for key in ("best", "last", "stopped_epoch", "global_step"):
            assert told[key] == expected[key], (name, key)
        assert told["score"] == pytest.approx(expected["score"], rel=1e-9)


def leaders_of(folder: Path, name: str) -> list[str]:
    """Who led after each step that a process has seen."""
    return list(told_by(folder, name)["leaders"].values())


def epochs_in(text: str) -> set[int]:
    """Those that a progress bar has shown."""
    return {int(number) for number in re.findall(r"Epoch (\d+): ", text)}


# B8: the leader dies, and comes back


def test_the_leader_dies_and_comes_back(workers, undisturbed, tmp_path):
    """It joins again but never leads while a veteran lives: no ping-pong. The next leader dies, too."""
    faults = "kill r0.s0@5:backward, return r0.s0@6, kill r0.s1@15"
    played = run(workers, tmp_path, "await_return=7", faults=faults)
    played.survivors("r0.s0.0", "r0.s1.0")
    assert_like(tmp_path, undisturbed)
    assert_decided_alike(tmp_path, undisturbed, "r1.s0.0", "r1.s1.0", "r0.s0.1")
    assert leaders_of(tmp_path, "r1.s1.0") == ["r0.s0"] * 5 + ["r0.s1"] * 10 + ["r1.s0"] * 9
    assert leaders_of(tmp_path, "r0.s0.1") == ["r0.s1"] * 7 + ["r1.s0"] * 9, "it came to step 8"
    shown = {name: epochs_in(text) for name, text in played.texts.items()}
    assert shown["r0.s0.0"] == {0, 1} and {1, 2, 3} <= shown["r0.s1.0"] <= {0, 1, 2, 3}
    assert {3, 4, 5} <= shown["r1.s0.0"] and f"Epoch {STOPPED_EPOCH}: 100%" in played.texts["r1.s0.0"]
    assert not shown["r0.s0.1"] and not shown["r1.s1.0"]


@pytest.mark.parametrize("moment", ["7:outside#6", "15:evaluation#2"], ids=["saving", "validating"])
def test_the_leader_dies_outside_a_step(workers, undisturbed, tmp_path, moment):
    """The best checkpoint and the decision to stop are the undisturbed run's."""
    played = run(workers, tmp_path, faults=f"kill r0.s0@{moment}")
    played.survivors("r0.s0.0")
    assert_like(tmp_path, undisturbed)
    assert_decided_alike(tmp_path, undisturbed, "r0.s1.0", "r1.s0.0", "r1.s1.0")


def test_a_joiner_decides_by_what_was_before_it(workers, tmp_path, tmp_path_factory):
    """It comes after the last checkpoint and between two validations: whether to link, to stop, to lower the rate."""
    undisturbed = tmp_path_factory.mktemp("undisturbed")
    workers.run(fit_dense, 1, "linked=1", cwd=undisturbed)
    faults = "kill r0.s0@5:backward, return r0.s0@13"
    run(workers, tmp_path, "linked=1", "await_return=14", faults=faults).survivors("r0.s0.0")
    assert told_by(undisturbed, "dense")["best"].endswith("epoch=3-step=14.ckpt")
    assert_like(tmp_path, undisturbed)
    assert_decided_alike(tmp_path, undisturbed, "r0.s0.1", "r0.s1.0", "r1.s0.0", "r1.s1.0")
    assert (tmp_path / "csv/version_0/checkpoints/last.ckpt").is_symlink()


def test_the_leader_is_drained(workers, undisturbed, tmp_path):
    """It closes what the next leader opens."""
    played = run(workers, tmp_path, faults="drain r0.s0@5")
    assert played.codes == {"r0.s0.0": ExitCode.DRAINED, "r0.s1.0": 0, "r1.s0.0": 0, "r1.s1.0": 0}, played.story
    assert_like(tmp_path, undisturbed)
    assert_decided_alike(tmp_path, undisturbed, "r0.s1.0", "r1.s0.0", "r1.s1.0")


@pytest.fixture
def job(tmp_path) -> Iterator[Launched]:
    with launched(tmp_path) as job:
        yield job


def start(job: Launched, *words: str, faults: str = "", through: tuple[str, ...] = ()) -> subprocess.Popen:
    """The real script, by itself or through a launcher."""
    root = str(Path(SCRIPT).parents[2])
    return job.start(*through, SCRIPT, str(job.directory), *words, env={"NTP_FAULTS": faults, "PYTHONPATH": root})


def end(process: subprocess.Popen, limit_s: float = 400.0) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=limit_s)
    return process.returncode, out, err


@pytest.mark.slow
def test_python_train_py_outlives_its_leader(job, undisturbed, tmp_path):
    """``python live_fit.py``: rank 0 is killed and started again."""
    code, out, err = end(start(job, "respawn=once", "await_return=7", faults="kill r0.s0@5:backward"))
    assert code == 0, err
    assert_like(tmp_path, undisturbed)
    assert_decided_alike(tmp_path, undisturbed, "r0.s1.0", "r1.s0.0", "r1.s1.0", "r0.s0.1")
    assert leaders_of(tmp_path, "r1.s0.0") == ["r0.s0"] * 5 + ["r0.s1"] * 19
    assert epochs_in(out) == set(range(STOPPED_EPOCH + 1)) and f"Epoch {STOPPED_EPOCH}: 100%" in out
    assert "lost on the way: rank 0 (r0.s0) was ended by SIGKILL" in err.splitlines()[-1]
    assert "Traceback" not in err and "r0.s0 is started again" in err


# B7: errors of the user's own


@pytest.mark.parametrize("error", ["training_step", "callback", "configure_optimizers", "dataset", "exit"])
def test_a_mistake_on_one_member_ends_the_job(workers, tmp_path, error):
    """Within five seconds, with its traceback and its seat, without a recovery; nobody tries to save."""
    played = run(workers, tmp_path, f"error={error}", "save_on_exception=1")
    codes = dict(played.codes)
    assert codes.pop("r1.s0.0") == (3 if error == "exit" else 1), played.story
    assert set(codes.values()) == {ExitCode.JOB_FAILED}, played.story
    last = "SystemExit: 3" if error == "exit" else f"ValueError: r1.s0.0: a mistake in {error}"
    assert played.fatal.startswith("r1.s0: Traceback") and played.fatal.strip().endswith(last)
    for name in codes:
        assert f"JobFailed: r1.s0 ended the job: {last}" in played.texts[name]
        assert "Traceback" not in played.texts[name], "the traceback is the culprit's"
    assert not list(tmp_path.glob("csv/*/checkpoints/*"))
    assert played.generation == 0, "no recovery"
    took_s = max(end.at for end in played.ends) - float((tmp_path / "raised").read_text())
    assert took_s < 5.0


@pytest.mark.slow
def test_an_error_that_looks_like_a_lost_connection_ends_the_job(workers, tmp_path):
    """A plain RuntimeError is a user's own if nobody dies within ``classify_s``."""
    played = run(workers, tmp_path, "error=shapes")
    assert played.codes["r1.s0.0"] == 1 and played.fatal.strip().endswith("RuntimeError: r1.s0.0: a mistake in shapes")
    assert sorted(played.codes.values()) == [1, 84, 84, 84] and played.generation == 0


@pytest.mark.slow
def test_the_launcher_tells_of_a_mistake(job):
    """Exit code and last lines of ``python live_fit.py``."""
    code, _, err = end(start(job, "degrees=1,1", "error=training_step"))
    assert code == 1
    [summary] = re.findall(r"(?s)lightning_ntp: the job failed after.*", err)
    assert "exit code 1: r1.s0 ended the job:" in summary
    assert "ValueError: r1.s0.0: a mistake in training_step" in summary
    # The member's own; the summary has it once more if the member was too slow to end by itself.
    assert err.count("Traceback (most recent call last)") == 1 + ("Traceback" in summary)
    assert err.count("JobFailed: r1.s0 ended the job: ValueError: r1.s0.0: a mistake in training_step") == 1


# Stops


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_all_members(workers, tmp_path, signum):
    """SIGTERM rides in the vote: all stop after one step, and can save. SIGINT stops each where it is: none can."""
    played = run(workers, tmp_path, "epochs=1000", "save_on_exception=1", signal=signum)
    assert set(played.codes.values()) == {0 if signum == signal.SIGTERM else 1}, played.story
    steps = {int(path.read_text().split()[0]) for path in tmp_path.glob("*.step")}
    saved = [torch.load(path)["global_step"] for path in tmp_path.glob("csv/*/checkpoints/last.ckpt")]
    if signum == signal.SIGTERM:
        assert len(steps) == 1 and saved == list(steps)
    else:
        assert max(steps) - min(steps) <= 1 and all(step % STEPS == 0 for step in saved)
    assert played.generation == 0


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_to_the_launcher(job, signum, code):
    process = start(job, "degrees=1,1", "epochs=100000", "save_on_exception=1")
    until(lambda: len(list(job.directory.glob("*.0.step"))) == 2, "no steps", 300.0)
    began = time.monotonic()
    process.send_signal(signum)
    found, _, err = end(process)
    assert found == code and time.monotonic() - began < 30.0, err
    assert ("lightning_ntp: the job was stopped by SIGINT" in err) == (signum == signal.SIGINT)
    assert "Traceback" not in err


@pytest.mark.slow
def test_without_fault_tolerance_a_death_ends_the_job(job):
    process = start(job, "degrees=1,1", "epochs=100000", "tolerant=0")
    until(lambda: len(list(job.directory.glob("rank?.step"))) == 2, "no steps", 300.0)
    os.kill(int((job.directory / "rank1.step").read_text().split()[1]), signal.SIGKILL)
    code, _, err = end(process)
    assert code == 137 and "rank 1 (r1.s0) was ended by SIGKILL" in err.splitlines()[-1]


# B9: torchrun


@pytest.mark.slow
def test_torchrun_through_run_outlives_rank_2_and_rank_0(job, undisturbed, tmp_path):
    job.env["NTP_TOKEN"] = ""
    faults = "kill r1.s0@5:backward, kill r0.s0@14:vote"  # ranks 2 and 0
    code, _, err = end(start(job, faults=faults, through=(*TORCHRUN, "4", "-m", "lightning_ntp.run")))
    assert code == 0, err
    assert_like(tmp_path, undisturbed)
    assert_decided_alike(tmp_path, undisturbed, "rank1", "rank3")
    for rank, seat in ((2, "r1.s0"), (0, "r0.s0")):
        assert f"lost on the way: rank {rank} ({seat}) was ended by SIGKILL" in err


@pytest.mark.slow
def test_plain_torchrun_trains_and_ends_with_the_first_death(job):
    process = start(job, "degrees=1,1", "epochs=100000", through=(*TORCHRUN, "2"))
    until(lambda: len(list(job.directory.glob("rank?.step"))) == 2, "no steps", 300.0)
    os.kill(int((job.directory / "rank1.step").read_text().split()[1]), signal.SIGKILL)
    code, _, err = end(process)
    assert code == 1 and "Signal 9 (SIGKILL)" in err
