"""Files of whole Trainers: saved at some degrees, gone on from at others and in plain Lightning, in both directions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.dist.checkpoint_legs import assert_same
from tests.lightning.checkpoint_runs import MODEL, Job, Scheduled, Told, load_badly, run_job, save_badly, watch


def progress(path: str | Path) -> dict:
    """What a file says of loops and schedulers, without the loader's position (it names the shares)."""
    saved = torch.load(path)
    kept = {key: saved[key] for key in ("epoch", "global_step", "lr_schedulers")}
    return kept | {name: state for name, state in saved["loops"]["fit_loop"].items() if name != "state_dict"}


def assert_goes_on(job: Job, told: Told, whole: Job, truth: Told, first: int) -> None:
    """The run ``job`` did the steps from ``first`` on as ``whole`` did, and its last file is the same."""
    assert list(told.weights) == [step for step in truth.weights if step >= first]
    for step, weights in told.weights.items():
        assert_same(weights, truth.weights[step], rtol=1e-12)
        assert told.rates[step] == truth.rates[step]
    ours, theirs = (torch.load(f"{each.folder}/end.ckpt") for each in (job, whole))
    assert_same(ours["state_dict"], theirs["state_dict"], rtol=1e-12)
    for mine, other in zip(ours["optimizer_states"], theirs["optimizer_states"], strict=True):
        assert_same(mine, other, rtol=1e-12)


def test_resume_in_mid_epoch_at_other_degrees(workers, tmp_path):
    """Nine steps in three epochs; the file is from step 4, inside the second epoch."""
    whole = Job((4, 3), 4, str(tmp_path / "whole"), accumulate=2, max_epochs=3, shuffle="torch")
    truth = workers.run(run_job, 7, whole)
    assert list(truth[0].weights) == list(range(1, 10))
    for degrees, batch_size in (((4, 3), 4), ((2, 2), 4), ((3, 1), 4), ((1,), 8)):
        folder = str(tmp_path / "-".join(map(str, degrees)))
        job = replace(
            whole, degrees=degrees, batch_size=batch_size, folder=folder, load=f"{whole.folder}/step=4.ckpt", seed=9
        )
        told = workers.run(run_job, job.world_size, job)
        assert_goes_on(job, told[0], whole, truth[0], first=5)
        assert progress(f"{folder}/end.ckpt") == progress(f"{whole.folder}/end.ckpt")
        assert samples(told, job) == samples(truth, whole)[4:]
    again, exact = torch.load(f"{tmp_path}/4-3/end.ckpt"), torch.load(f"{whole.folder}/end.ckpt")
    assert_same(again["state_dict"], exact["state_dict"])  # bitwise at the same degrees


def test_resume_from_a_validation_in_mid_epoch(workers, tmp_path):
    whole = Job((2, 1), 4, str(tmp_path / "whole"), accumulate=2, val_every=2, shuffle="torch")
    truth = workers.run(run_job, 3, whole)
    job = replace(whole, degrees=(1, 1), folder=str(tmp_path / "rest"), load=f"{whole.folder}/val-step=5.ckpt", seed=9)
    told = workers.run(run_job, 2, job)
    assert_goes_on(job, told[0], whole, truth[0], first=6)
    assert told[0].metrics["val_loss"] == pytest.approx(truth[0].metrics["val_loss"], rel=1e-12)
    files = sorted(path.name for path in Path(job.folder).iterdir())
    assert files == ["end.ckpt", "val-step=6.ckpt"], "validation 5 is not run again"


def samples(told: list[Told], job: Job) -> list[list[int]]:
    """Sample ids of every optimizer step, over the replicas."""
    replicas = [told[sum(job.degrees[:replica])].seen for replica in range(len(job.degrees))]
    batches = [sum(parts, []) for parts in zip(*replicas, strict=True)]
    return [sorted(sum(window, [])) for window in zip(*[iter(batches)] * job.accumulate, strict=True)]


def test_plain_lightning_in_both_directions(workers, tmp_path):
    """Twelve steps in two epochs; the files are from the last step of the first one, and from after it."""
    ours, plain = (
        Job(degrees, size, str(tmp_path / name), every=6)
        for degrees, size, name in (((2, 1), 4, "ours"), (None, 8, "plain"))
    )
    told, truth = workers.run(run_job, 3, ours)[0], workers.run(run_job, 1, plain)[0]
    assert_goes_on(ours, told, plain, truth, first=1)
    for file in ("step=6", "epoch=0"):
        ends = []
        for start, job in ((plain, plain), (ours, plain), (plain, ours), (ours, ours)):
            folder = f"{job.folder}-from-{Path(start.folder).name}-{file}"
            rest = replace(job, folder=folder, load=f"{start.folder}/{file}.ckpt", seed=9)
            assert_goes_on(rest, workers.run(run_job, rest.world_size, rest)[0], plain, truth, first=7)
            ends.append(progress(f"{folder}/end.ckpt"))
        assert ends[1:] == ends[:1] * 3, "plain Lightning counts on in the same way"

    module = Scheduled.load_from_checkpoint(f"{ours.folder}/end.ckpt", config=MODEL)
    assert_same(module.state_dict(), truth.weights[12], rtol=1e-12)
    assert not any("ntp" in type(part).__module__ for part in module.modules())


def test_callbacks_that_save_and_stop(workers, tmp_path):
    told = workers.run(watch, 3, (2, 1), str(tmp_path))
    first = told[0]
    assert {replace(each, dense=None) == replace(first, dense=None) for each in told} == {True}, "ranks disagree"
    assert Path(first.best).name == "epoch=1.ckpt" and Path(first.last).name == "last.ckpt"
    assert first.kept == ["epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"]
    assert (first.stopped_epoch, first.epochs) == (2, 3)
    assert first.validated == pytest.approx(first.dense, rel=1e-12)
    assert first.steps == (6, 8)


def test_failing_saves_and_loads(workers, tmp_path):
    told = workers.run(save_badly, 3, str(tmp_path))
    assert all(each == told[0] for each in told), "ranks disagree"
    errors = told[0].errors
    assert list(errors) == ["below a file", "options", "spoilt"]
    assert "CheckpointError: cannot write" in errors["below a file"] and "good.ckpt/x.ckpt" in errors["below a file"]
    assert "UnsupportedError: storage_options={'a': 1}" in errors["options"]
    assert "CheckpointError" in errors["spoilt"] and "cannot be pickled" in errors["spoilt"]
    assert told[0].steps == [2, 4], "the old file is whole: training went on from it"
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp")]
    assert set(torch.load(tmp_path / "weights.ckpt")) >= {"state_dict", "loops"}

    (tmp_path / "folder.ckpt").mkdir()
    (tmp_path / "torn.ckpt").write_bytes((tmp_path / "weights.ckpt").read_bytes()[:999])
    saved = torch.load(tmp_path / "new" / "folders" / "good.ckpt")
    del saved["state_dict"]["model.norm.weight"]
    torch.save(saved, tmp_path / "other.ckpt")
    names = ("weights", "folder", "torn", "other", "nowhere")
    errors = workers.run(load_badly, 3, {name: str(tmp_path / f"{name}.ckpt") for name in names})
    assert all(each == errors[0] for each in errors), "ranks disagree"
    assert list(errors[0]) == list(names)
    assert "contains only the model" in errors[0]["weights"]
    assert "CheckpointError" in errors[0]["folder"] and "is a folder" in errors[0]["folder"]
    assert "CheckpointError" in errors[0]["torn"] and "damaged" in errors[0]["torn"]
    assert "CheckpointError" in errors[0]["other"] and "model.norm.weight" in errors[0]["other"]
    assert "nowhere.ckpt" in errors[0]["nowhere"]
