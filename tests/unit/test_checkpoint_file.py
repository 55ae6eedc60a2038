"""One checkpoint file: whole or not there, whatever happens in between; and what reading one accepts."""

from __future__ import annotations

import argparse
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_ntp.checkpoint import read_file, save_file
from lightning_ntp.errors import CheckpointError

NOBODY = 65534
OLD = {"state_dict": {"w": torch.arange(4.0)}, "epoch": 1}


def new() -> dict:
    return {"state_dict": {"w": torch.ones(1 << 20), "v": torch.ones(1 << 20)}, "epoch": 2}


def assert_old(path: Path) -> None:
    found = torch.load(path)
    assert found["epoch"] == 1
    assert torch.equal(found["state_dict"]["w"], OLD["state_dict"]["w"])


def leftovers(folder: Path) -> list[str]:
    return [each.name for each in folder.iterdir() if each.name.endswith(".tmp")]


def test_round_trip_and_format(tmp_path):
    path = tmp_path / "deeper" / "a.ckpt"
    save_file(OLD, path)
    plain, ours = torch.load(path, weights_only=True), read_file(path)
    assert plain["epoch"] == ours["epoch"] == 1
    assert torch.equal(ours["state_dict"]["w"], OLD["state_dict"]["w"])
    assert [each.name for each in path.parent.iterdir()] == ["a.ckpt"]


def test_mode_is_that_of_any_new_file(tmp_path):
    """A temporary file's usual 0600 would lock out the group that shares a folder of checkpoints."""
    path, other = tmp_path / "a.ckpt", tmp_path / "other"
    save_file(OLD, path)
    other.write_text("")
    assert path.stat().st_mode == other.stat().st_mode


def test_replaces_and_removes_what_a_crash_left(tmp_path):
    path = tmp_path / "a.ckpt"
    leftover, foreign = tmp_path / ".a.ckpt.0badcafe.tmp", tmp_path / ".b.ckpt.0badcafe.tmp"
    leftover.write_text("half"), foreign.write_text("another file's")
    save_file(OLD, path)
    save_file(new(), path)
    assert torch.load(path)["epoch"] == 2
    assert leftovers(tmp_path) == [foreign.name]


def test_mapped_file_survives_the_next_save(tmp_path):
    path = tmp_path / "a.ckpt"
    save_file(OLD, path)
    mapped = read_file(path)
    save_file(new(), path)
    assert torch.equal(mapped["state_dict"]["w"], OLD["state_dict"]["w"])


class _KilledWhilePickled:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)


class _KilledWhileWriting:
    def __init__(self, file) -> None:
        self.file, self.written = file, 0

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self.file.close()

    def write(self, data) -> int:
        self.written += self.file.write(data)
        self.file.flush()
        if self.written > 1 << 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return len(data)


def save_and_die(rank: int, world_size: int, store: str, moment: str, path: str) -> None:
    """Be killed at a moment of the second save."""

    def die(*_) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    save_file(OLD, path)
    checkpoint = new()
    if moment == "pickling":
        checkpoint["callbacks"] = _KilledWhilePickled()
    elif moment == "writing":
        plain_open = Path.open
        Path.open = lambda self, mode: _KilledWhileWriting(plain_open(self, mode))
    else:
        setattr(os, moment, die)
    save_file(checkpoint, path)


@pytest.mark.parametrize("moment", ["pickling", "writing", "fsync", "replace"])
def test_kill_leaves_the_old_file(workers, tmp_path, moment):
    path = tmp_path / "a.ckpt"
    workers.run(save_and_die, 1, moment, str(path), expect_exit={0: -signal.SIGKILL})
    assert_old(path)
    assert len(leftovers(tmp_path)) == 1, "the kill came before or after the save, not in it"
    save_file(new(), path)
    assert torch.load(path)["epoch"] == 2
    assert not leftovers(tmp_path)


def save_onto_a_full_disk(rank: int, world_size: int, store: str, path: str) -> str:
    save_file(OLD, path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError) as error:
        save_file(new(), path)
    return str(error.value)


def test_full_disk_leaves_the_old_file(workers, tmp_path):
    path = tmp_path / "a.ckpt"
    (message,) = workers.run(save_onto_a_full_disk, 1, str(path))
    assert str(path) in message and "File too large" in message and "free space" in message
    assert_old(path)
    assert not leftovers(tmp_path)


def test_refuses_a_folder_in_the_way(tmp_path):
    with pytest.raises(CheckpointError, match="a folder of that name"):
        save_file(OLD, tmp_path)


def test_refuses_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="dirpath of ModelCheckpoint"):
        save_file(OLD, tmp_path / "file" / "a.ckpt")


def test_refuses_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    user = os.geteuid()
    if user == 0:  # root may write anywhere
        os.seteuid(NOBODY)
    try:
        with pytest.raises(CheckpointError, match="Permission denied"):
            save_file(OLD, tmp_path / "a.ckpt")
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)


def test_unpicklable_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.ckpt"
    save_file(OLD, path)
    with pytest.raises(CheckpointError, match="cannot be pickled.*save_hyperparameters"):
        save_file({"hyper_parameters": {"activation": lambda x: x}}, path)
    assert_old(path)
    assert not leftovers(tmp_path)


def test_read_of_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        read_file(tmp_path / "a.ckpt")


def test_read_of_a_folder(tmp_path):
    with pytest.raises(CheckpointError, match="consolidate_checkpoint"):
        read_file(tmp_path)


@pytest.mark.parametrize("keep", [0, 100, 0.5, 0.99])
def test_read_of_a_damaged_file(tmp_path, keep):
    path = tmp_path / "a.ckpt"
    save_file(new(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: keep if isinstance(keep, int) else int(keep * len(whole))])
    with pytest.raises(CheckpointError, match="a.ckpt"):
        read_file(path)


def test_read_of_another_file(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("loss went down\n")
    with pytest.raises(CheckpointError, match="notes.txt"):
        read_file(path, weights_only=False)
    torch.save(torch.ones(2), path)
    with pytest.raises(CheckpointError, match="holds a Tensor"):
        read_file(path)


def test_old_torch_format(tmp_path):
    path = tmp_path / "a.pt"
    torch.save(OLD, path, _use_new_zipfile_serialization=False)
    assert torch.equal(read_file(path)["state_dict"]["w"], OLD["state_dict"]["w"])


def test_weights_only_is_torchs(tmp_path):
    """None means what torch takes it for: objects are refused until the user vouches for the file."""
    path = tmp_path / "a.ckpt"
    save_file({"hyper_parameters": argparse.Namespace(lr=0.1)}, path)
    with pytest.raises(CheckpointError, match="pass weights_only=False"):
        read_file(path)
    assert read_file(path, weights_only=False)["hyper_parameters"].lr == 0.1


def test_module_metadata_passes_weights_only(tmp_path):
    path = tmp_path / "a.ckpt"
    save_file({"state_dict": nn.BatchNorm1d(2).state_dict()}, path)
    assert read_file(path, weights_only=True)["state_dict"]._metadata[""]["version"] == 2


def test_urls_go_through_fsspec(tmp_path):
    url = f"file://{tmp_path}/a.ckpt"
    save_file(OLD, url)
    assert_old(tmp_path / "a.ckpt")
    assert read_file(url)["epoch"] == 1
    for call in (lambda: save_file(OLD, f"{url}/b.ckpt"), lambda: read_file(f"file://{tmp_path}/none.ckpt")):
        with pytest.raises(CheckpointError, match="ckpt"):
            call()
