"""The leader's duties in one process: users' loggers, files that a kill left, and what is missing in them."""

from __future__ import annotations

import csv
import struct
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_ntp.compat import loggers as compat
from lightning_ntp.errors import UnsupportedError
from lightning_ntp.strategies.logger_adapters import Call, CSVAdapter, LoggerAdapter, TensorBoardAdapter
from lightning_ntp.strategies.takeover import LeaderDuties, compare


@pytest.fixture
def leader() -> Iterator[None]:
    rank_zero_only.rank = 0
    yield


class Unknown(Logger):
    """A user's logger that keeps everything."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[dict, int]] = []

    name = version = "unknown"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append((metrics, step))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


class Adapted(Unknown):
    """One that can be moved."""

    def ntp_adapter(self) -> LoggerAdapter:
        return Adapter(self)


class Adapter(LoggerAdapter):
    def state(self) -> Any:
        return "the run"

    def adopt(self, state: Any) -> None:
        self.logger.run = state

    def take_over(self) -> None:
        if self.logger.run != "the run":
            raise RuntimeError("no such run")

    def doubtful(self, calls: list[Call], unflushed: int) -> list[Call]:
        return calls[len(calls) - unflushed :]


def plain_trainer(*loggers: Logger) -> Trainer:
    return Trainer(logger=list(loggers), accelerator="cpu", enable_progress_bar=False, enable_checkpointing=False)


def test_an_unknown_logger_gives_a_warning(leader):
    trainer = plain_trainer(Unknown())
    duties = LeaderDuties(trainer)
    with pytest.warns(UserWarning, match="what Unknown writes may stop if the leader dies.*ntp_adapter"):
        duties.share(lambda obj: obj)
    trainer.logger.log_metrics({"a": 1.0}, 0)
    duties.take_over()
    assert trainer.logger.calls == [({"a": 1.0}, 0)], "nothing is repeated: nobody knows whether it was written"


@pytest.mark.parametrize("logger", [Adapted(), Unknown()])
def test_a_users_adapter(logger):
    """Its own method or an argument; calls after the last step that all have ended are repeated."""
    trainer, other = plain_trainer(logger), plain_trainer(type(logger)())
    adapters = {Unknown: Adapter}
    duties = LeaderDuties(other, adapters)
    rank_zero_only.rank = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        state = LeaderDuties(trainer, adapters).state()
        rank_zero_only.rank = 1
        duties.share(lambda obj: state)
        for step in range(3):
            if step == 2:
                duties.flush()
            other.logger.log_metrics({"a": step}, step)
        rank_zero_only.rank = 0
        duties.take_over()
    assert [step for _, step in other.logger.calls] == [0, 1, 2, 2]


def test_a_logger_that_fails_does_not_end_the_training(leader):
    trainer = plain_trainer(Adapted())
    duties = LeaderDuties(trainer)
    duties.adopt(["another run"])
    with pytest.warns(UserWarning, match="Adapted does not go on after the leader has changed.*no such run"):
        duties.take_over()
    trainer.logger.log_metrics({"a": 1.0}, 0)
    duties.flush()
    duties.close()
    trainer.logger.save()
    assert trainer.logger.calls == []


def test_what_waits_is_written_at_a_flush_and_when_the_leader_leaves(leader, tmp_path):
    """Rows of direct calls: the Trainer saves after its own."""
    trainer = plain_trainer(CSVLogger(tmp_path), TensorBoardLogger(tmp_path))
    duties = LeaderDuties(trainer)
    duties.share(lambda obj: obj)
    for step, end in enumerate((duties.flush, duties.hand_over)):
        for logger in trainer.loggers:
            logger.log_metrics({"a": 1.0}, step)
        rank_zero_only.rank = step
        end()
        others = [type(logger)(tmp_path, version=logger.version) for logger in trainer.loggers]
        assert [row["step"] for row in compat.open_rows(others[0])] == ["0", "1"][: step + 1]
        assert compat.written_points(others[1]) == [(0, "a"), (1, "a")][: step + 1]
    rank_zero_only.rank = 0  # whoever still takes it for the leader
    for logger in trainer.loggers:
        logger.log_metrics({"a": 1.0}, 2)
        logger.save()
        logger.finalize("failed")
    assert [row["step"] for row in compat.open_rows(others[0])] == ["0", "1"]
    assert len(compat.written_points(others[1])) == 2


def test_loggers_get_their_methods_back(leader, tmp_path):
    trainer = plain_trainer(CSVLogger(tmp_path))
    LeaderDuties(trainer)
    duties = LeaderDuties(trainer)
    trainer.logger.log_metrics({"a": 1.0}, 0)
    assert trainer.logger.experiment.metrics == [{"a": 1.0, "step": 0}], "a second fit does not wrap twice"
    duties.close()
    assert not {"log_metrics", "log_hyperparams"} & set(vars(trainer.logger))


def test_a_missing_attribute_is_named():
    with pytest.raises(UnsupportedError, match=r"has no Unknown\._root, which lightning_ntp needs"):
        compat.require(Unknown(), "_root")


# What is missing and what is ahead


def marks(call: Call) -> dict[tuple, list[str]]:
    return {(call.step, name): [name] for name in call.metrics}


def calls_of(*names_by_step: tuple[int, str]) -> list[Call]:
    return [Call(dict.fromkeys(names, 0.0), step) for step, names in names_by_step]


@pytest.mark.parametrize(
    ("calls", "written", "missing", "ahead"),
    [
        (calls_of((0, "ae"), (1, "ae")), "0a 0e 1a 1e", [], ""),
        (calls_of((0, "ae"), (1, "ae")), "0a 0e", [(1, "ae")], ""),
        (calls_of((0, "ae"), (1, "ae")), "0a 0e 1a", [(1, "e")], ""),  # killed in mid-call
        (calls_of((0, "ae")), "0a 0e 1a 1e", [], "1a 1e"),
        (calls_of((0, "ae")), "0a 0e 0v 0e", [], "0v 0e"),  # two calls of a step share a name
        (calls_of((0, "ae"), (0, "ve"), (0, "me")), "0a 0e 0v 0e", [(0, "me")], ""),
        (calls_of((7, "a"), (8, "a"), (9, "a")), "8a", [(9, "a")], ""),  # the older part of the file was not read
        (calls_of((0, "a"), (1, "a")), "0a 0t 1t", [(1, "a")], "1t 0t"),  # t: the leader's alone
        ([], "0a", [], "0a"),
        (calls_of((0, "a")), "", [(0, "a")], ""),
    ],
)
def test_compare(calls, written, missing, ahead):
    def parse(text: str) -> list[tuple[int, str]]:
        return [(int(each[0]), each[1:]) for each in text.split()]

    found, before = compare(calls, parse(written), marks)
    assert [(call.step, "".join(call.metrics)) for call in found] == missing
    assert before == Counter(parse(ahead))


# Files


def csv_of(folder: Path, text: str) -> tuple[CSVLogger, Path]:
    path = folder / "lightning_logs/version_0/metrics.csv"
    path.parent.mkdir(parents=True)
    path.write_bytes(text.replace("\n", "\r\n").encode())
    return CSVLogger(folder, version=0), path


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("a,step\n1.0,0\n2.0,1\n", "a,step\n1.0,0\n2.0,1\n"),
        ("a,step\n1.0,0\n2.", "a,step\n1.0,0\n"),
        ("a,step\n", "a,step\n"),
        ("a,st", None),
    ],
)
def test_a_torn_line_is_cut(text, kept, leader, tmp_path):
    logger, path = csv_of(tmp_path, text)
    rows = compat.open_rows(logger)
    assert (path.read_bytes().decode().replace("\r\n", "\n") if path.exists() else None) == kept
    assert [row["step"] for row in rows] == [line.split(",")[1] for line in (kept or "").splitlines()[1:]]
    logger.log_metrics({"a": 3.0, "b": 4.0}, 2)
    logger.save()
    with path.open(newline="") as file:
        assert list(csv.DictReader(file))[-1] == {"a": "3.0", "b": "4.0", "step": "2"}


def test_a_kill_while_the_header_grows_loses_nothing(leader, tmp_path, monkeypatch):
    """Lightning empties the file before it writes it again."""
    logger = CSVLogger(tmp_path)
    compat.keep_rows(logger)
    logger.log_metrics({"a": 1.0}, 0)
    logger.save()
    logger.log_metrics({"a": 2.0, "b": 3.0}, 1)
    monkeypatch.setattr(csv.DictWriter, "writerows", lambda *_: (_ for _ in ()).throw(InterruptedError))
    with pytest.raises(InterruptedError):
        logger.save()
    monkeypatch.undo()
    other = CSVLogger(tmp_path, version=0)
    assert compat.open_rows(other) == [{"a": "1.0", "step": "0"}]


def test_only_the_newest_rows_are_read(leader, tmp_path):
    logger, _ = csv_of(tmp_path, "a,step\n" + "".join(f"1.0,{step}\n" for step in range(60_000)))
    rows = compat.open_rows(logger)
    assert 512 < len(rows) < 60_000 and rows[-1] == {"a": "1.0", "step": "59999"}
    assert all(row["a"] == "1.0" for row in rows)


def test_a_prefix_belongs_to_the_name(leader, tmp_path):
    old, new = (CSVLogger(tmp_path, version=0, prefix="p") for _ in range(2))
    old.log_metrics({"a": 1.0}, 0)
    old.save()
    adapter = CSVAdapter(new)
    adapter.take_over()
    assert compare([Call({"a": 1.0}, 0), Call({"a": 1.0}, 1)], adapter.written(), adapter.marks)[0] == [
        Call({"a": 1.0}, 1, pytest.approx(time.monotonic(), abs=10))
    ]


def test_events_files_of_one_second_stay_in_order(leader, tmp_path):
    """Names begin with the second; a torn record ends its file."""
    old, new = (TensorBoardLogger(tmp_path, version=0) for _ in range(2))
    for step in range(3):
        old.log_metrics({"a": 1.0}, step)
    old.finalize("failed")
    [path] = Path(old.log_dir).glob("events*")
    first = path.rename(path.with_name(f"events.out.tfevents.{int(time.time())}.zebra.1.0"))
    with first.open("ab") as file:
        file.write(struct.pack("<QI", 100, 0) + b"torn")
    adapter = TensorBoardAdapter(new)
    adapter.take_over()
    assert adapter.written() == [(step, "a") for step in range(3)]
    new.log_metrics({"a": 1.0}, 3)
    new.finalize("failed")
    assert sorted(Path(old.log_dir).glob("events*"))[0] == first
    assert [each.step for each in EventAccumulator(old.log_dir).Reload().Scalars("a")] == [0, 1, 2, 3]


def test_a_clock_that_is_ahead_is_not_waited_for(leader, tmp_path):
    logger = TensorBoardLogger(tmp_path, version=0)
    Path(logger.log_dir).mkdir(parents=True)
    (Path(logger.log_dir) / f"events.out.tfevents.{int(time.time()) + 3600}.zebra.1.0").touch()
    began = time.monotonic()
    compat.await_later_name(logger)
    assert time.monotonic() - began < 0.5
