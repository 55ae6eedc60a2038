"""The order of an epoch: a function of (seed, epoch), the same in every process.

The user's sampler is kept. What torch draws by itself (``shuffle=True``) is drawn from a generator of our own; any
other sampler is iterated once an epoch with the global generators forked and seeded, and so is a batch sampler, whose
lists are read as a stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_ntp.data.cut import Extent
from lightning_ntp.data.seeding import derive_seed, forked_rng
from lightning_ntp.errors import DataError


@dataclass(frozen=True)
class Order:
    """The samples of one epoch in their order.

    Attributes:
        ids: The sample ids, as the sampler names them: a range, an integer array or a list.
        extent: Their number, and the ends of the batch sampler's lists if there is one.
    """

    ids: Any
    extent: Extent

    def at(self, positions: range) -> list[Any]:
        """The ids at consecutive positions, as plain Python objects."""
        ids = self.ids[positions.start : positions.stop]
        return ids.tolist() if hasattr(ids, "tolist") else list(ids)


class EpochOrders:
    """The orders of all epochs of one DataLoader.

    Args:
        loader: The user's DataLoader over a map-style dataset.
        seed: Seed of the run; the same in every process.

    Raises:
        DataError: for a DistributedSampler over several replicas, or a sampler without a length.
    """

    def __init__(self, loader: DataLoader, seed: int) -> None:
        self.seed = seed
        batches = loader.batch_sampler
        # A subclass may make its lists in any way, so only torch's own class may be replaced by its sampler.
        self._lists = None if type(batches) is BatchSampler else batches
        self._sampler = batches.sampler if type(batches) is BatchSampler else None
        for sampler in (loader.sampler, self._sampler, getattr(batches, "sampler", None)):
            _refuse_distributed(sampler)
        _refuse_endless(batches if self._sampler is None else self._sampler)
        self._latest: tuple[int, int, Order] | None = None

    @property
    def has_lists(self) -> bool:
        """Whether the user's own batch sampler decides what comes together."""
        return self._lists is not None

    def of(self, epoch: int) -> Order:
        """The order of ``epoch``; the latest one is kept.

        Raises:
            DataError: if the sampler yields nothing.
        """
        if self._latest is None or self._latest[:2] != (self.seed, epoch):
            self._latest = (self.seed, epoch, self._make(epoch))
        return self._latest[2]

    def _make(self, epoch: int) -> Order:
        seed = derive_seed(self.seed, epoch, "order")
        if self._lists is not None:
            lists = [ids for ids in map(list, _draw(self._lists, epoch, seed)) if ids]
            ends = tuple(accumulate(len(ids) for ids in lists))
            order = Order(list(chain.from_iterable(lists)), Extent(ends[-1] if ends else 0, ends))
        else:
            ids = self._sample(epoch, seed)
            order = Order(ids, Extent(len(ids)))
        if order.extent.total < 1:
            name = type(self._lists if self._lists is not None else self._sampler).__name__
            raise DataError(f"the sampler {name} yields no sample in epoch {epoch}: give a dataset that is not empty")
        return order

    def _sample(self, epoch: int, seed: int) -> Any:
        sampler = self._sampler
        if type(sampler) is SequentialSampler:
            return range(len(sampler))
        if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
            return torch.randperm(len(sampler), generator=torch.Generator().manual_seed(seed)).numpy()
        return _draw(sampler, epoch, seed)


def nominal_batch_size(loader: DataLoader) -> int | None:
    """Samples of one batch of the user's loader; None if a batch sampler of the user's does not say."""
    if loader.batch_size is not None:
        return loader.batch_size
    size = getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) and size > 0 else None


def _draw(sampler: Any, epoch: int, seed: int) -> list[Any]:
    """The ids of a sampler or the lists of a batch sampler, under random numbers that depend on ``seed`` only."""
    parts = [part for part in (sampler, getattr(sampler, "sampler", None)) if part is not None]
    for part in parts:
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)
    generators = [g for part in parts if isinstance(g := getattr(part, "generator", None), torch.Generator)]
    states = [generator.get_state() for generator in generators]
    with forked_rng(seed):
        # A generator of the sampler's own would go on from wherever this process left it.
        for generator in generators:
            generator.manual_seed(seed)
        try:
            # Lightning ends an epoch at len(), too; it bounds a sampler that never ends.
            return list(islice(sampler, len(sampler)))
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def _refuse_distributed(sampler: Any) -> None:
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise DataError(
            f"the DataLoader has a {type(sampler).__name__} over {sampler.num_replicas} replicas, but the strategy "
            "cuts the global batch itself, by the replicas' shares: pass the plain sampler (or shuffle=True)"
        )


def _refuse_endless(sampler: Any) -> None:
    if not hasattr(type(sampler), "__len__"):
        raise DataError(
            f"the sampler {type(sampler).__name__} has no __len__, so nobody knows where an epoch ends: define __len__ "
            "(the number of ids in an epoch; of lists, for a batch sampler)"
        )
