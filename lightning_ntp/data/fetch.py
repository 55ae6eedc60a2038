"""Loading the samples that we choose, with the user's dataset, collate function and workers.

An inner DataLoader is fed by a stream of requests. A request carries its random seeds, and both the dataset and the
collate function run under them, in a worker as in the main process. So a sample's random transform depends on the seed,
the epoch and the sample's position in the epoch's order: not on the replica, the shares, the number of workers, or
where a run was resumed. (A dataset with ``__getitems__`` fetches a micro-batch at once and gets one seed for it.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader, Subset

from lightning_ntp.data.seeding import derive_seed, forked_rng, seed_global
from lightning_ntp.errors import DataError


@dataclass(frozen=True)
class Request:
    """Samples to load together.

    Attributes:
        ids: Their ids.
        first: Position of the first of them in the epoch's order; the others follow.
        key: Seed of the run and epoch.
    """

    ids: list[Any]
    first: int
    key: tuple[int, int]


class Fetcher:
    """Turns requests into collated batches, in their order, with the user's number of workers.

    Args:
        loader: The user's DataLoader.
        replica: Number of this replica; all its tensor-parallel ranks start their workers with the same seeds.

    Attributes:
        iterator: The running iterator of the inner DataLoader, or None. Lightning shuts down the workers of the object
            that it finds in a loader's ``_iterator`` and puts None there: the wrappers hand this attribute out for
            that.
    """

    def __init__(self, loader: DataLoader, replica: int) -> None:
        self.iterator: Any = None
        self._user_loader = loader
        self._replica = replica
        self._feed = _Feed()
        self._fetched = self._stale = 0
        self._inner: DataLoader | None = None
        self._generator = torch.Generator()

    def start(self, requests: Iterable[Request], *seed: int | str, in_same_pass: bool = False) -> None:
        """Load ``requests`` from now on; whatever was prefetched for earlier ones is dropped.

        Args:
            requests: Read ahead of ``fetch`` by the workers' prefetching.
            seed: Parts of the seed for new workers.
            in_same_pass: Go on with the workers that are there: those of this epoch know the dataset as it is.
        """
        self._feed.requests = iter(requests)
        if in_same_pass and self.iterator is not None and not self._is_exhausted:
            # No fork in the middle of a recovery, when threads of broken groups are on their way out: a worker that is
            # forked then was seen to crash, and to hang.
            self._stale = self._feed.read - self._fetched
            return
        self._feed.read = self._fetched = self._stale = 0
        self._generator.manual_seed(derive_seed(*seed, self._replica, "workers"))
        if self._inner is None or (self._inner.persistent_workers and self.iterator is None):
            # The second case: Lightning has stopped persistent workers, and their DataLoader cannot start new ones.
            self._inner = _inner_loader(self._user_loader, self._feed, self._generator, self._replica)
        if not self._inner.persistent_workers:
            self.iterator = None  # ends the old workers before new ones start
        self.iterator = iter(self._inner)

    def fetch(self) -> Any:
        """The next batch."""
        while self._stale:  # of requests that no longer count; a sample that fails among them may never be wanted
            self._stale -= 1
            self._fetched += 1
            with suppress(Exception):
                next(self.iterator)
        try:
            self._fetched += 1
            return next(self.iterator)
        except StopIteration:
            # Let out, it would end the epoch in silence.
            raise AssertionError("fewer batches were requested than are fetched") from None

    @property
    def _is_exhausted(self) -> bool:
        """Whether the inner iterator has ended, or ends with its next item: it takes no more requests then."""
        return self._feed.has_ended and self._feed.read == self._fetched

    def stop(self) -> None:
        """The requests are at an end: let the workers go, unless they are persistent."""
        if self._inner is not None and not self._inner.persistent_workers:
            self.iterator = None


def refuse_unknown_loader(loader: Any) -> None:
    """Check that ``loader`` is one whose batches can be cut.

    Raises:
        DataError: if it is not a DataLoader, does not batch, or iterates in a way of its own.
    """
    name = type(loader).__name__
    if not isinstance(loader, DataLoader):
        raise DataError(
            f"cannot cut the batches of a {name}: pass a torch DataLoader (of a map-style dataset, or of an "
            "IterableDataset whose batches are dealt whole)"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise DataError(
            f"{name} overrides DataLoader.__iter__, which would not be called when its batches are cut by shares: pass "
            "a plain DataLoader and put what is done to a batch into its collate_fn"
        )
    if loader.batch_sampler is None and not _is_iterable(loader):
        raise DataError(
            f"the DataLoader of {type(loader.dataset).__name__} has batch_size=None, so there are no batches to cut: "
            "set batch_size, or pass a batch_sampler"
        )


class _Feed:
    """The inner DataLoader's batch sampler. It can be filled again while it is read.

    Attributes:
        requests: What is read next.
        read: Requests that were read so far.
        has_ended: Whether the reader was told that there are no more.
    """

    def __init__(self) -> None:
        self.requests: Iterator[Request] = iter(())
        self.read = 0
        self.has_ended = False

    def __iter__(self) -> _Feed:
        self.has_ended = False
        return self

    def __next__(self) -> Request:
        request = next(self.requests, None)
        self.has_ended = request is None
        if request is None:
            raise StopIteration
        self.read += 1
        return request


@dataclass
class _Fetched:
    items: list[Any]
    seed: int


class _SeededDataset:
    """The user's dataset, fetched under the request's seeds. Everything else of it is reached as before."""

    def __init__(self, dataset: Any) -> None:
        self.__dict__["_dataset"] = dataset

    def __getitems__(self, request: Request) -> _Fetched:
        dataset = self._dataset
        with forked_rng():
            if _fetches_batches(dataset):
                seed_global(derive_seed(*request.key, request.first, "samples"))
                items = dataset.__getitems__(request.ids)
            else:
                items = [self._item(request, offset) for offset in range(len(request.ids))]
        return _Fetched(items, derive_seed(*request.key, request.first, "collate"))

    def _item(self, request: Request, offset: int) -> Any:
        seed_global(derive_seed(*request.key, request.first + offset, "sample"))
        return self._dataset[request.ids[offset]]

    # A worker_init_fn finds this object as get_worker_info().dataset and may read or set what the dataset has.
    def __getattr__(self, name: str) -> Any:
        if "_dataset" not in self.__dict__:  # being unpickled
            raise AttributeError(name)
        return getattr(self.__dict__["_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __len__(self) -> int:
        return len(self._dataset)


class _SeededCollate:
    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, fetched: _Fetched) -> Any:
        with forked_rng(fetched.seed):
            return self._collate(fetched.items)


def _inner_loader(loader: DataLoader, feed: _Feed, generator: torch.Generator, replica: int) -> DataLoader:
    return DataLoader(
        _SeededDataset(loader.dataset),
        batch_sampler=feed,
        num_workers=loader.num_workers,
        collate_fn=_SeededCollate(loader.collate_fn),
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=worker_init(loader.worker_init_fn, replica),
        multiprocessing_context=loader.multiprocessing_context,
        generator=generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        # Batches are told apart by their order alone.
        in_order=True,
    )


def worker_init(user_function: Callable[[int], None] | None, rank: int) -> Callable[[int], None] | None:
    """The user's worker_init_fn, or Lightning's where ``seed_everything(workers=True)`` asked for it.

    Lightning seeds workers by the global rank; here all ranks that must load the same data pass the same ``rank``.
    """
    is_lightning = isinstance(user_function, partial) and user_function.func is pl_worker_init_function
    if is_lightning or (user_function is None and int(os.environ.get("PL_SEED_WORKERS", 0))):
        return partial(pl_worker_init_function, rank=rank)
    return user_function


def _fetches_batches(dataset: Any) -> bool:
    """Whether the dataset has a ``__getitems__`` of its own; a Subset only passes on what it wraps."""
    if type(dataset) is Subset:
        return _fetches_batches(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


def _is_iterable(loader: DataLoader) -> bool:
    return isinstance(loader.dataset, torch.utils.data.IterableDataset)
