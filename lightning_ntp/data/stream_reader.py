"""One epoch of an IterableDataset's loader, the same in every process that reads it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from lightning_ntp.data.fetch import worker_init
from lightning_ntp.data.order import nominal_batch_size
from lightning_ntp.data.seeding import RandomStream, derive_seed


class StreamReader:
    """Reads the batches of one epoch, under random numbers of its own.

    Args:
        loader: The user's DataLoader over an IterableDataset.
        seed: Seed of the run, the same in every process.
        epoch: Passed on to the dataset's own ``set_epoch``, if it has one.

    Attributes:
        num_read: Batches read so far.
        at_end: Whether the stream has ended, or is closed.
    """

    def __init__(self, loader: DataLoader, seed: int, epoch: int) -> None:
        if callable(set_epoch := getattr(loader.dataset, "set_epoch", None)):
            set_epoch(epoch)
        self.num_read = 0
        self._random = RandomStream(derive_seed(seed, epoch, "stream"))
        with self._random.active():
            self._iterator: Iterator[Any] | None = iter(loader)

    @property
    def at_end(self) -> bool:
        return self._iterator is None

    def read(self, count: int) -> list[Any]:
        """The next ``count`` batches; fewer at the stream's end."""
        if self._iterator is None:
            return []
        with self._random.active():
            batches = list(islice(self._iterator, count))
        self.num_read += len(batches)
        if len(batches) < count:
            self.close()
        return batches

    def close(self) -> None:
        """Let the workers go, unless they are persistent; nothing more is read."""
        self._iterator = None


def read_alike(loader: DataLoader) -> None:
    """Let the workers of all ranks read the same: Lightning would seed every rank's differently."""
    loader.worker_init_fn = worker_init(loader.worker_init_fn, rank=0)


def stream_batch_size(loader: DataLoader) -> int:
    """Samples that a batch is taken to have: 1 if the dataset makes the batches."""
    return nominal_batch_size(loader) or 1
