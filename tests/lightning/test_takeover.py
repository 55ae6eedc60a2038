"""The leader dies, or leaves, and another member goes on with what it wrote and showed."""

from __future__ import annotations

import csv
import importlib
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.lightning.takeover_runs import (
    STEPS,
    STOPPED_EPOCH,
    Seen,
    Takeover,
    fit_rank,
    mlflow_logger,
    wandb_logger,
)

STEP = 5  # the second of the second epoch


@pytest.fixture(scope="module")
def undisturbed(workers, tmp_path_factory) -> tuple[Path, Seen]:
    folder = tmp_path_factory.mktemp("undisturbed")
    [seen] = workers.run(fit_rank, 1, None, cwd=folder, env={"COLUMNS": "120"})
    return folder, seen


@pytest.fixture
def taken_over(workers, tmp_path) -> Callable[..., Seen]:
    def run(takeover: Takeover, **options: Any) -> Seen:
        exits = {} if takeover.drained else {rank: -9 for rank in range(len(takeover.dies))}
        options["env"] = {"COLUMNS": "120"} | options.get("env", {})
        return workers.run(fit_rank, len(takeover.dies) + 1, takeover, cwd=tmp_path, expect_exit=exits, **options)[-1]

    return run


def rows_of(folder: Path) -> list[dict[str, str]]:
    [path] = folder.glob("logs/csv/*/metrics.csv")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def curves_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every scalar, as TensorBoard reads the folder."""
    [version] = folder.glob("logs/tensorboard/*")
    events = EventAccumulator(str(version)).Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def files_of(folder: Path) -> list[str]:
    """All that the loggers and ModelCheckpoint left, with the events files as one."""
    names = [path.relative_to(folder).as_posix() for path in folder.glob("logs/**/*") if path.is_file()]
    return sorted({re.sub(r"events\.out\..*", "events", name) for name in names})


def assert_like(folder: Path, seen: Seen, undisturbed: tuple[Path, Seen]) -> None:
    """Nothing is lost and nothing is there twice."""
    other, expected = undisturbed
    assert rows_of(folder) == rows_of(other)
    assert curves_of(folder) == curves_of(other)
    assert files_of(folder) == files_of(other)
    for name in ("csv", "tensorboard"):
        assert (folder / f"logs/{name}/version_0/hparams.yaml").read_text() == "lr: 0.1\n"
    assert seen.stopped_epoch == expected.stopped_epoch and seen.metrics == expected.metrics
    assert seen.best == expected.best and seen.places == expected.places
    ours, theirs = (torch.load(each / seen.last, weights_only=True) for each in (folder, other))
    assert ours["global_step"] == theirs["global_step"]
    assert all(torch.equal(ours["state_dict"][name], theirs["state_dict"][name]) for name in theirs["state_dict"])


def shown_after(seen: Seen) -> str:
    before, after = seen.out.split("--- takes over ---")
    assert "Epoch" not in before, "only the leader has a bar"
    return after


def test_the_undisturbed_run(undisturbed):
    """What the others are compared with has what it should have."""
    folder, seen = undisturbed
    rows = rows_of(folder)
    steps = [int(row["step"]) for row in rows if row["loss_step"]]
    assert steps == list(range(STEPS * (STOPPED_EPOCH + 1))) and seen.stopped_epoch == STOPPED_EPOCH
    assert [int(row["step"]) for row in rows if row["lr-SGD"]] == steps
    assert [row["val_loss"] for row in rows if row["val_loss"]] == ["3.0", "2.0", "1.0", "4.0", "5.0"]
    assert Path(seen.best).name == "epoch=2-step=12.ckpt"


AFTER_IT_LOGGED = Takeover((("train_batch_start", STEP + 1),), (("train_batch_start", STEP + 1),))
IN_VALIDATION = Takeover((("validation_step", 3),), (("validation_step", 3),))
CASES = {
    "before it logs": Takeover((("train_batch_end", STEP),), (("train_batch_start", STEP + 1),)),
    "after it logged": AFTER_IT_LOGGED,
    "ahead of the other": Takeover((("train_batch_end", STEP + 1),), (("training_step", STEP),)),
    "a step behind the other": Takeover((("training_step", STEP),), (("train_batch_end", STEP),)),
    "in mid-write": replace(AFTER_IT_LOGGED, torn=3),
    "in validation": IN_VALIDATION,
    "before the epoch's means": Takeover((("epoch_saved", 1),), (("train_batch_start", 2 * STEPS),)),
    "in the sanity check": Takeover((("sanity_validation_step", 1),), (("sanity_validation_step", 1),)),
    "at its first step": Takeover((("train_batch_end", 0),), (("training_step", 0),)),
    "and the next one too": Takeover(
        (("train_batch_end", STEP), ("train_batch_end", STEP + 1)),
        (("train_batch_start", STEP + 1), ("training_step", STEP + 1)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_leader_is_killed(case, taken_over, undisturbed, tmp_path):
    """B8: every row once, one continuous curve, and the callbacks decide as if nothing had happened."""
    seen = taken_over(CASES[case])
    assert_like(tmp_path, seen, undisturbed)
    after = shown_after(seen)
    epoch = {"before the epoch's means": 2, "in the sanity check": 0, "at its first step": 0}.get(case, 1)
    assert f"Epoch {epoch}: " in after and f"Epoch {epoch - 1}: " not in after
    assert f"Epoch {STOPPED_EPOCH}: 100%" in after


def test_the_leader_leaves(taken_over, undisturbed, tmp_path):
    """A drain: it closes what the other opens, and its own end changes nothing."""
    seen = taken_over(replace(AFTER_IT_LOGGED, drained=True))
    assert_like(tmp_path, seen, undisturbed)
    assert f"Epoch {STOPPED_EPOCH}: 100%" in shown_after(seen)


@pytest.mark.parametrize("takeover", [AFTER_IT_LOGGED, IN_VALIDATION], ids=["training", "validation"])
def test_the_bar_goes_on_where_it_was(takeover, taken_over):
    lines = [line for line in re.split(r"[\r\n]+", shown_after(taken_over(takeover))) if "Epoch" in line]
    done = STEPS if takeover is IN_VALIDATION else 2
    assert f" {done}/{STEPS} [" in lines[1], "it starts at 0 and jumps to where the fit is"


@pytest.mark.parametrize("takeover", [AFTER_IT_LOGGED, IN_VALIDATION], ids=["training", "validation"])
def test_rich_goes_on_too(takeover, taken_over, undisturbed, tmp_path):
    seen = taken_over(replace(takeover, bar="rich"))
    assert_like(tmp_path, seen, undisturbed)
    after = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown_after(seen))
    shown = [(int(epoch), int(done)) for epoch, done in re.findall(r"Epoch (\d)/5 .*? (\d)/4 ", after)]
    done = STEPS if takeover is IN_VALIDATION else 2
    assert (1, done) in shown and shown == sorted(shown) and shown[-1] == (STOPPED_EPOCH, STEPS)
    assert not {(1, batches) for batches in range(1, done)} & set(shown), "it starts at 0 and jumps to where the fit is"
    if takeover is IN_VALIDATION:  # another one may be over before the screen is drawn again
        assert "Validation" in after


@pytest.mark.parametrize("takeover", [AFTER_IT_LOGGED, IN_VALIDATION], ids=["training", "validation"])
def test_throughput_goes_on(takeover, taken_over, undisturbed, tmp_path):
    """Its rows come from the leader alone; the new one counts anew, and says nothing twice."""
    taken_over(replace(takeover, throughput=True))
    rows, expected = rows_of(tmp_path), rows_of(undisturbed[0])
    steps = [int(row["step"]) for row in rows if row["train/time"]]
    assert steps == list(range(STEPS * (STOPPED_EPOCH + 1)))
    rows = [row for row in rows if not (row["train/time"] or row["validate/time"])]
    assert [{name: row[name] for name in expected[0]} for row in rows] == expected


@pytest.mark.parametrize("drained", [False, True], ids=["killed", "drained"])
def test_wandb_goes_on_in_its_run(drained, taken_over, undisturbed, tmp_path):
    """Offline: one id, two folders; every step is there, and at its value, though points may come twice."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    seen = taken_over(replace(AFTER_IT_LOGGED, drained=drained, loggers=(wandb_logger,)), allow_leftovers=True)
    paths = sorted(tmp_path.glob("logs/wandb/offline-run-*/run-*.wandb"))
    assert len(paths) == 2 and {path.stem for path in paths} == {f"run-{seen.places[2][1]}"}
    rows = [row for path in paths for row in wandb_history(path)]
    ours = {(row["trainer/global_step"], row["loss_step"]) for row in rows if "loss_step" in row}
    assert ours == {(int(row["step"]), float(row["loss_step"])) for row in rows_of(undisturbed[0]) if row["loss_step"]}


def wandb_history(path: Path) -> Iterator[dict[str, Any]]:
    """The logged rows of a ``.wandb`` file: LevelDB's log format, of protobuf records."""
    record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record()
    data, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := -place % 2**15 or 2**15) < 7:  # of the block
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record.ParseFromString(parts)
            parts = b""
            items = record.history.item
            yield {item.key or ".".join(item.nested_key): float(item.value_json) for item in items if _is_number(item)}


def _is_number(item: Any) -> bool:
    return re.fullmatch(r"-?[0-9.]+(e-?\d+)?", item.value_json) is not None


def test_mlflow_goes_on_in_its_run(taken_over, undisturbed, tmp_path):
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    takeover = replace(CASES["before it logs"], loggers=(mlflow_logger,))
    taken_over(takeover, env={"MLFLOW_ALLOW_FILE_STORE": "true"})
    [path] = tmp_path.glob("logs/mlflow/*/*/metrics/loss_step")
    points = [line.split()[1:] for line in path.read_text().splitlines()]
    expected = [(int(row["step"]), float(row["loss_step"])) for row in rows_of(undisturbed[0]) if row["loss_step"]]
    assert [(int(step), float(value)) for value, step in points] == expected
    assert "status: 3" in (path.parents[1] / "meta.yaml").read_text(), "FINISHED"
