"""Write a checkpoint so that a file of that name is always a whole one, and read one without copying it."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lightning_ntp.errors import CheckpointError


def save_file(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write ``checkpoint`` to ``path`` with ``torch.save``; the leader alone calls it.

    A local file is written under another name in the same folder, flushed to the disk, and then takes the place of an
    older one in a single step, so a crash or a full disk at any moment leaves the older one as it was. What a crash
    leaves behind, ``.NAME.*.tmp``, is deleted by the next save to the same path. A URL goes through fsspec, as in
    Lightning, with the guarantees of its file system.

    Raises:
        CheckpointError: if the file cannot be written, or the checkpoint cannot be pickled.
    """
    with _explained(path):
        if _is_url(path):
            TorchCheckpointIO().save_checkpoint(checkpoint, path)
        else:
            _replace(checkpoint, Path(path))


def read_file(path: str | os.PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
    """Read a checkpoint into host memory; every member may call it.

    The tensors of a local file are mapped, not copied: what a member does not touch costs it nothing, and the members
    of a machine share what they touch.

    Args:
        path: A file that ``save_file``, plain Lightning or ``torch.save`` wrote, or a URL of one.
        weights_only: As in Lightning: by default ``True`` for files and ``False`` for ``http`` URLs.

    Raises:
        CheckpointError: if there is no such file, it is not a checkpoint, it is damaged, or it holds objects that
            ``weights_only`` forbids.
    """
    file = os.fspath(path)
    if os.path.isdir(file):
        raise CheckpointError(
            f"{file!r} is a folder, such as strategies with sharded checkpoints write: turn it into one file with "
            f"`python -m lightning.fabric.utilities.consolidate_checkpoint {file}`"
        )
    try:
        loaded = _load(file, weights_only)
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {file!r}: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"cannot read the checkpoint {file!r} with weights_only={weights_only}: {error}. If it is whole and "
            "you trust its source, pass weights_only=False"
        ) from error
    except (RuntimeError, EOFError, zipfile.BadZipFile) as error:
        reason = str(error) or type(error).__name__
        raise CheckpointError(f"{file!r} is damaged or not a checkpoint: {reason}") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{file!r} holds a {type(loaded).__name__}, not the dict that a checkpoint is")
    return loaded


def _replace(checkpoint: dict[str, Any], target: Path) -> None:
    if target.is_dir():
        raise IsADirectoryError("a folder of that name is in the way")
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in _temporaries(target):
        leftover.unlink(missing_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        _write(checkpoint, temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush_folder(target.parent)


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    with path.open("xb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())


def _load(file: str, weights_only: bool | None) -> Any:
    if _is_url(file):
        return TorchCheckpointIO().load_checkpoint(file, map_location="cpu", weights_only=weights_only)
    if zipfile.is_zipfile(file):
        with contextlib.suppress(RuntimeError):  # a file system that cannot map, or a damaged file: told apart below
            return torch.load(file, map_location="cpu", weights_only=weights_only, mmap=True)
    return torch.load(file, map_location="cpu", weights_only=weights_only)


def _is_url(path: str | os.PathLike[str]) -> bool:
    return "://" in os.fspath(path)


def _temporaries(target: Path) -> list[Path]:
    start, end = f".{target.name}.", ".tmp"
    return [each for each in target.parent.iterdir() if each.name.startswith(start) and each.name.endswith(end)]


def _flush_folder(folder: Path) -> None:
    """Let the new name outlive a power cut. Not every file system can, and the file itself is safe by now."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _explained(path: str | os.PathLike[str]) -> Iterator[None]:
    what = f"cannot write the checkpoint {os.fspath(path)!r}"
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = _system_error(error) or error
        reason = cause.strerror or cause if isinstance(cause, OSError) else cause
        raise CheckpointError(
            f"{what}: {reason}. An older file of that name is as it was; free space or choose another folder "
            "(default_root_dir, or dirpath of ModelCheckpoint)"
        ) from error
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{what}: an object in it cannot be pickled: {error}. Keep such objects out of save_hyperparameters() and "
            "on_save_checkpoint"
        ) from error
    except Exception as error:  # a driver of a remote file system may raise anything; the members rely on one kind
        raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error


def _system_error(error: BaseException) -> OSError | None:
    """The failure of the system call: torch reports a full disk as a position that does not fit."""
    seen: BaseException | None = error
    while seen is not None and not (isinstance(seen, OSError) and seen.errno):
        seen = seen.__context__
    return seen
