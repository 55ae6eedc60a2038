"""One set of values, one version, one progress bar, whatever the number of members."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.lightning.logger_runs import EPOCHS, SAMPLES, STEPS, Logging, default_rank, graph_rank, loggers_rank
from tests.support.zygote import WorkerError

TRAIN = [(step, step // STEPS) for step in range(STEPS * EPOCHS)]


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every scalar in the one events file of ``folder``."""
    [file] = folder.glob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(file)).Reload()
    return {
        tag: [(each.step, each.value) for each in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def columns(path: Path) -> dict[str, list[tuple[int, float]]]:
    """The same for a CSV file."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        name: [(int(row["step"]), float(row[name])) for row in rows if row[name]] for name in rows[0] if name != "step"
    }


def test_default_trainer(workers, tmp_path):
    """A8: nothing but ``strategy="ntp"``: default logger, ModelCheckpoint, progress bar, ModelSummary."""
    told = workers.run(default_rank, 4, cwd=tmp_path, env={"COLUMNS": "120"})
    assert [path.name for path in tmp_path.iterdir()] == ["lightning_logs"]
    [version] = (tmp_path / "lightning_logs").iterdir()
    scalars = events(version)
    assert [step for step, _ in scalars["loss_step"]] == [step for step, _ in TRAIN]
    assert [step for step, _ in scalars["val_loss"]] == [STEPS * epoch - 1 for epoch in range(1, EPOCHS + 1)]
    assert {value for _, value in scalars["rank"]} == {0.0}
    [file] = (version / "checkpoints").iterdir()
    assert {Path(each.best).name for each in told} == {file.name} and {each.log_dir for each in told} == {
        told[0].log_dir
    }
    assert torch.load(file, weights_only=True)["hyper_parameters"] == {"lr": 1e-3}
    assert (version / "hparams.yaml").read_text() == "lr: 0.001\n"
    plain = Logging.load_from_checkpoint(file, lr=0.5)
    assert plain(torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, 101) and plain.hparams.lr == 0.5

    assert "Epoch 1/1" in told[0].out
    assert "Trainable params" in told[0].out + told[0].err
    assert told[0].err.count("stopped: `max_epochs=2` reached") == 1
    assert not any(each.out for each in told[1:]), "one progress bar"
    assert not any("params" in each.err or "max_epochs" in each.err for each in told[1:])


def test_two_loggers_with_unequal_replicas(workers, tmp_path):
    told = workers.run(loggers_rank, 3, (2, 1), cwd=tmp_path, env={"COLUMNS": "120"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["csv", "tensorboard"]
    assert [path.name for path in (tmp_path / "csv").iterdir()] == ["version_0"]
    assert [path.name for path in (tmp_path / "tensorboard").iterdir()] == ["version_0"]
    table, scalars = columns(tmp_path / "csv/version_0/metrics.csv"), events(tmp_path / "tensorboard/version_0")
    assert set(table) == {"epoch", "loss_step", "loss_epoch", "samples", "rank", "val_loss", "lr-SGD"}
    assert set(scalars) - set(table) == {"hp_metric"}
    for name in set(table) - {"epoch"}:
        assert [step for step, _ in table[name]] == [step for step, _ in scalars[name]], name
        assert [value for _, value in table[name]] == pytest.approx([value for _, value in scalars[name]], rel=1e-6)
    assert [step for step, _ in table["loss_step"]] == [step for step, _ in TRAIN]
    assert [value for _, value in table["samples"]] == [float(SAMPLES)] * EPOCHS
    assert [value for _, value in table["lr-SGD"]] == [1e-3, 5e-4]
    means = [sum(value for _, value in table["loss_step"][STEPS * e : STEPS * (e + 1)]) / STEPS for e in range(EPOCHS)]
    assert [value for _, value in table["loss_epoch"]] == pytest.approx(means, rel=1e-12)
    same = [{name: each.metrics[name] for name in ("loss_epoch", "samples", "val_loss")} for each in told]
    assert same == [same[0]] * 3, "EarlyStopping and ModelCheckpoint decide alike"
    assert "Epoch 1: 100%" in told[0].out and not any(each.out for each in told[1:])


def test_a_logged_graph_is_refused(workers, tmp_path):
    """Only the leader would run the forward, and wait for the others for ever."""
    with pytest.raises(WorkerError, match=r"log_graph=True\) is not supported"):
        workers.run(graph_rank, 2, cwd=tmp_path)
