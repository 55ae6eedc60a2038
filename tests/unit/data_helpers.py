"""Small datasets and samplers, and a walk over the loaders of all replicas, for the data tests."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_ntp.data import MicroBatch, ShareLoader


class Squares(Dataset):
    """Sample i is i squared; ``length`` samples."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index * index)


class Noisy(Squares):
    """Every sample with random numbers from all three global generators."""

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, torch.rand(()).item(), float(np.random.rand()), random.random()


class EveryOther:
    """A user's sampler: random, from the global generator, over every other sample."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.length // 2

    def __iter__(self):
        yield from (2 * torch.randperm(self.length // 2)).tolist()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Buckets:
    """A user's batch sampler: lists of unequal lengths, each of neighbours."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self):
        starts = np.cumsum([0, *self.sizes])
        for bucket in np.random.permutation(len(self.sizes)):
            yield list(range(int(starts[bucket]), int(starts[bucket + 1])))


def make_loaders(loader: DataLoader, shares: tuple[int, ...], k: int = 1, **kwargs) -> list[ShareLoader]:
    """One loader a replica."""
    kwargs = {"seed": 5, "micro_batches": k, **kwargs}
    return [ShareLoader(loader, replica=r, shares=shares, **kwargs) for r in range(len(shares))]


def walk(loader, limit: int | None = None) -> list[MicroBatch]:
    """The facts of an epoch's micro-batches (of ``limit`` of them at most), without those in ``iter``."""
    facts = []
    for _ in loader:
        facts.append(loader.current)
        if len(facts) == limit:
            break
    return facts


def take(loader, count: int) -> list[MicroBatch]:
    """Facts of the next ``count`` micro-batches, from where the loader stands."""
    facts = []
    for _ in range(count):
        next(loader)
        facts.append(loader.current)
    return facts


def ids_of(facts: list[MicroBatch]) -> list[int]:
    return [sample for fact in facts for sample in fact.sample_ids]


def global_batches(per_replica: list[list[MicroBatch]]) -> list[list[int]]:
    """The ids of every window over all replicas, in replica order; checks that the replicas tell the same story."""
    windows: dict[int, list[int]] = {}
    for facts in per_replica:
        for fact in facts:
            windows.setdefault(fact.window, []).extend(fact.sample_ids)
    for facts in zip(*per_replica, strict=True):
        assert len({(f.epoch, f.window, f.index, f.count, f.global_samples) for f in facts}) == 1
    for fact in per_replica[0]:
        assert fact.global_samples == len(windows[fact.window])
    return [windows[window] for window in sorted(windows)]
