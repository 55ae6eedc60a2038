"""Private attributes of Lightning's loggers, progress bars and ThroughputMonitor, and the files that loggers leave.

Each function looks for its attributes when it is called and says what is missing. None runs a collective.
"""

from __future__ import annotations

import csv
import importlib
import io
import os
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import lightning
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.callbacks import RichProgressBar, ThroughputMonitor, TQDMProgressBar
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from lightning_ntp.errors import UnsupportedError

_PLACE = ("_root_dir", "_save_dir", "_name", "_version")
_CSV_TAIL_BYTES = 2**18  # rows that are compared with the newest calls
_EVENTS = 4096  # the same for TensorBoard


def require(thing: Any, *names: str) -> None:
    """Check that a logger, callback or class has the private attributes ``names``.

    Raises:
        UnsupportedError: names the first that is missing.
    """
    owner = thing if isinstance(thing, type) else type(thing)
    for name in names:
        if not hasattr(thing, name):
            raise UnsupportedError(
                f"lightning {lightning.__version__} has no {owner.__name__}.{name}, which lightning_ntp needs: install "
                "a version of lightning inside the range that this package declares"
            )


# Where a logger writes


def place(logger: Any) -> dict[str, Any]:
    """What another process needs to write to the same place: folder, name and version, as far as a logger has them."""
    _ = getattr(logger, "version", None)  # chosen when it is asked for the first time
    return {name: getattr(logger, name) for name in _PLACE if name in vars(logger)}


def set_place(logger: Any, values: dict[str, Any]) -> None:
    """Let a logger write where ``place`` was read."""
    for name, value in values.items():
        if name in vars(logger):
            setattr(logger, name, value)


def prefixed(logger: Any, name: str) -> str:
    """A metric's name as the logger writes it."""
    prefix = getattr(logger, "_prefix", "")
    return f"{prefix}{logger.LOGGER_JOIN_CHAR}{name}" if prefix else name


def has_file(logger: Any, name: str) -> bool:
    """Whether there is a file ``name`` in the logger's folder."""
    require(logger, "_fs")
    return logger._fs.isfile(os.path.join(logger.log_dir, name))


def forget_experiment(logger: Any) -> Any:
    """The logger's open writer or run, or None; the logger has none from now on."""
    require(logger, "_experiment")
    experiment, logger._experiment = logger._experiment, None
    return experiment


# CSV


class RowKeepingWriter(ExperimentWriter):
    """As Lightning's writer of ``metrics.csv``, but it loses no row.

    Lightning's deletes the file that it finds, and empties it before it writes a longer header.
    """

    def _check_log_dir_exists(self) -> None:
        pass

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        with self._fs.open(self.metrics_file_path, "r", newline="") as file:
            rows = list(csv.DictReader(file))
        fresh = f"{self.metrics_file_path}.new"
        with self._fs.open(fresh, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=fieldnames)
            writer.writeheader()
            writer.writerows(rows)
        self._fs.mv(fresh, self.metrics_file_path)  # a rename, on local file systems


def keep_rows(logger: Any) -> None:
    """Give a CSVLogger that has written nothing yet a ``RowKeepingWriter``. A writer of the user's own stays."""
    require(ExperimentWriter, "_check_log_dir_exists", "_rewrite_with_new_header")
    require(logger, "_experiment")
    old = logger.experiment
    if type(old) is ExperimentWriter:
        logger._experiment = new = RowKeepingWriter(old.log_dir)
        new.metrics, new.metrics_keys, new.hparams = old.metrics, old.metrics_keys, old.hparams


def save_rows(logger: Any) -> None:
    """Write the rows that wait, whatever this process's rank. The writer stays: the next one would delete the file."""
    require(logger, "_experiment")
    if logger._experiment is not None:
        logger._experiment.save()


def open_rows(logger: Any) -> list[dict[str, str]]:
    """Let a CSVLogger go on in the file that another process wrote.

    A last line that the other could not finish is cut off.

    Returns:
        The newest rows, oldest first, by column.
    """
    require(ExperimentWriter, "_check_log_dir_exists", "_rewrite_with_new_header")
    require(logger, "_experiment", "_fs")
    writer = RowKeepingWriter(logger.log_dir)
    logger._experiment = writer
    if not writer._fs.isfile(writer.metrics_file_path):
        return []
    with writer._fs.open(writer.metrics_file_path, "rb") as file:
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data) and isinstance(writer._fs, LocalFileSystem):  # others write files whole
        os.truncate(writer.metrics_file_path, len(whole))
    if not whole:
        writer._fs.rm_file(writer.metrics_file_path)
        return []
    header, _, rest = whole.partition(b"\n")
    writer.metrics_keys = next(csv.reader([header.decode()]))
    if len(rest) > _CSV_TAIL_BYTES:
        rest = rest[-_CSV_TAIL_BYTES:].partition(b"\n")[2]
    return list(csv.DictReader(io.StringIO(rest.decode(), newline=""), fieldnames=writer.metrics_keys))


# TensorBoard


def import_tensorboard() -> Any:
    """Import what a TensorBoardLogger imports when it writes first; returns the class of its records."""
    try:
        importlib.import_module("torch.utils.tensorboard")
        proto = importlib.import_module("tensorboard.compat.proto.event_pb2")
    except ImportError:
        proto = importlib.import_module("tensorboardX.proto.event_pb2")
    return proto.Event


def written_points(logger: Any) -> list[tuple[int, str]]:
    """(step, tag) of the newest values in a TensorBoardLogger's folder, oldest first."""
    require(logger, "_fs")
    found: deque[tuple[int, str]] = deque()
    for path in reversed(_event_files(logger)):
        with logger._fs.open(path, "rb") as file:
            found.extendleft(reversed(list(_points(file))))
        if len(found) >= _EVENTS:
            break
    return list(found)


def await_later_name(logger: Any) -> None:
    """Wait until a new events file sorts behind those that are there: names begin with the second they were made in.

    A reader that meets the files in the other order shows a curve that runs backwards. At most 1 second, and only if
    the newest file was made in this second.
    """
    seconds = [os.path.basename(path).split(".")[3] for path in _event_files(logger)]
    newest = max((int(second) for second in seconds if second.isdigit()), default=0)
    while 0 < newest + 1 - time.time() <= 1:  # a file from a clock that is ahead of ours is not waited for
        time.sleep(0.01)


def _event_files(logger: Any) -> list[str]:
    folder = logger.log_dir
    paths = logger._fs.ls(folder, detail=False) if logger._fs.isdir(folder) else []
    return sorted(path for path in paths if os.path.basename(path).startswith("events.out.tfevents."))


def _points(file: BinaryIO) -> Iterator[tuple[int, str]]:
    """Of the newest records of one events file. A record that was not finished ends it."""
    event_of = import_tensorboard().FromString
    size = file.seek(0, os.SEEK_END)
    end, records = 0, deque(maxlen=_EVENTS)  # a record: length, its checksum, data, its checksum
    file.seek(0)
    while len(header := file.read(12)) == 12:
        length = struct.unpack("<Q", header[:8])[0]
        start, end = end + 12, end + length + 16
        if end > size:
            break
        records.append((start, length))
        file.seek(end)
    for start, length in records:
        file.seek(start)
        event = event_of(file.read(length))
        yield from ((event.step, value.tag) for value in event.summary.value)


# W&B and MLflow


def wandb_run(logger: Any) -> dict[str, Any]:
    """Id and shown name of a WandbLogger's run, which exists on the leader."""
    run = logger.experiment
    return {"id": run.id, "name": run.name}


def set_wandb_run(logger: Any, run: dict[str, Any]) -> None:
    """Let a WandbLogger without a run resume this one. One that was given a run of its own stays with it."""
    require(logger, "_experiment", "_wandb_init", "_id")
    if logger._experiment is None:
        logger._id = run["id"]
        logger._wandb_init |= {name: value for name, value in run.items() if value is not None} | {"resume": "allow"}


def mlflow_run(logger: Any) -> dict[str, str]:
    """Ids of an MLFlowLogger's run and experiment, which exist on the leader."""
    return {"_run_id": logger.run_id, "_experiment_id": logger.experiment_id}


def set_mlflow_run(logger: Any, run: dict[str, str]) -> None:
    """Let an MLFlowLogger go on in this run."""
    require(logger, "_initialized", *run)
    for name, value in run.items():
        setattr(logger, name, value)
    logger._initialized = False


def upload_at_end(logger: Any, checkpoints: Sequence[Any]) -> None:
    """Let a logger with ``log_model`` upload at the end what the old leader has saved and not uploaded."""
    if not getattr(logger, "_log_model", False) or not checkpoints:
        return
    if hasattr(logger, "_checkpoint_callbacks"):
        logger._checkpoint_callbacks.update({id(callback): callback for callback in checkpoints})
    else:
        require(logger, "_checkpoint_callback")
        logger._checkpoint_callback = checkpoints[-1]


# Progress bars and throughput


def start_progress_bar(trainer: Any) -> None:
    """Show the progress bar that was off on this process, at the epoch and batch where the fit is."""
    bar, module = trainer.progress_bar_callback, trainer.lightning_module
    if bar is None:
        return
    bar.enable()
    done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
    if isinstance(bar, TQDMProgressBar):
        _start_tqdm(bar, trainer, module, done)
    elif isinstance(bar, RichProgressBar):
        _start_rich(bar, trainer, module, done)


def _start_tqdm(bar: TQDMProgressBar, trainer: Any, module: Any, done: int) -> None:
    require(bar, "_train_progress_bar", "_leave")
    if bar._train_progress_bar is None:
        return  # its start comes later, and finds it enabled
    if trainer.sanity_checking:
        bar.val_progress_bar = bar.init_sanity_tqdm()
    else:
        if not bar._leave:  # else the epoch's start makes one
            bar.train_progress_bar = bar.init_train_tqdm()
        bar.on_train_epoch_start(trainer, module)
        _set_tqdm(bar.train_progress_bar, done)
    if trainer.validating:
        bar.val_progress_bar = bar.init_validation_tqdm()
    if (seen := _start_evaluation(bar, trainer, module)) is not None:
        _set_tqdm(bar.val_progress_bar, seen)


def _set_tqdm(bar: Any, done: int) -> None:
    if not bar.disable:
        bar.n = bar.initial = done  # of the first ones it knows no rate
        bar.refresh()


def _start_rich(bar: RichProgressBar, trainer: Any, module: Any, done: int) -> None:
    bar.on_train_start(trainer, module)
    if bar.progress is None:
        return  # refresh_rate=0
    if not trainer.sanity_checking:
        bar.on_train_epoch_start(trainer, module)
        bar.progress.update(bar.train_progress_bar_id, completed=done)
    if (seen := _start_evaluation(bar, trainer, module)) is not None and not trainer.sanity_checking:
        bar.progress.update(bar.val_progress_bar_id, completed=seen, visible=True)
    bar.refresh(hard=True)


def _start_evaluation(bar: Any, trainer: Any, module: Any) -> int | None:
    """Start the bar of a validation in progress; returns how many batches of its loader are done."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    batches = loop.batch_progress.current
    bar.reset_dataloader_idx_tracker()
    if not (trainer.validating or trainer.sanity_checking) or not batches.ready or trainer._results is None:
        return None
    index = trainer._results.dataloader_idx or 0
    done = int(batches.completed - sum(loop.max_batches[:index]))
    bar.on_validation_batch_start(trainer, module, None, done, index)
    return done


def stop_progress_bar(trainer: Any) -> None:
    """Take the progress bar off the screen."""
    bar = trainer.progress_bar_callback
    if bar is None:
        return
    bar.disable()
    if isinstance(bar, TQDMProgressBar):
        for shown in (bar._train_progress_bar, bar._val_progress_bar):
            if shown is not None:
                shown.close()
    elif isinstance(bar, RichProgressBar):
        require(bar, "_stop_progress")
        bar._stop_progress()


def restart_throughput(trainer: Any) -> None:
    """Let every ThroughputMonitor count from here: what the old leader counted is gone."""
    for callback in trainer.callbacks:
        if not isinstance(callback, ThroughputMonitor):
            continue
        require(callback, "_throughputs", "_t0s", "_lengths", "_samples", "_batches")
        for stage, throughput in callback._throughputs.items():
            throughput.reset()
            throughput.world_size = trainer.world_size
            callback._t0s[stage] = time.perf_counter()
            for counter in (callback._lengths, callback._samples, callback._batches):
                counter[stage] = 0
