"""Loaders for an IterableDataset, which has no sample ids to cut by: whole batches are dealt.

Every rank iterates the user's loader in full and takes its replica's batches, so the stream must be the same in every
process: a dataset that splits itself by rank does not belong here. Reading costs ``num_replicas`` times one replica's
part. There is no position to save: a resumed run starts the stream anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader

from lightning_ntp.data.batch import MicroBatch
from lightning_ntp.data.fetch import worker_init
from lightning_ntp.data.order import nominal_batch_size
from lightning_ntp.data.seeding import RandomStream, derive_seed
from lightning_ntp.errors import DataError
from lightning_ntp.policy import whole_shares


class _Groups:
    """The user's stream in groups of ``num_replicas`` consecutive batches, under random numbers of its own."""

    def __init__(self, loader: DataLoader, num_replicas: int, seed: int) -> None:
        self.loader = loader
        self.size = num_replicas
        self.epoch = 0
        self._seed = seed
        # Lightning would seed every rank's workers differently, but all ranks must read the same stream.
        loader.worker_init_fn = worker_init(loader.worker_init_fn, rank=0)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[list[Any]]:
        """Groups of batches; the last one may be incomplete."""
        if callable(set_epoch := getattr(self.loader.dataset, "set_epoch", None)):
            set_epoch(self.epoch)
        random_stream = RandomStream(derive_seed(self._seed, self.epoch, "stream"))
        with random_stream.active():
            iterator = iter(self.loader)
        while True:
            group: list[Any] = []
            with random_stream.active():
                for batch in iterator:
                    group.append(batch)
                    if len(group) == self.size:
                        break
            if group:
                yield group
            if len(group) < self.size:
                return


class StreamLoader:
    """Yields every ``len(shares)``-th batch of an IterableDataset's loader as the micro-batches of one replica.

    Of every group of R consecutive batches replica r takes the r-th. An incomplete last group is dropped, with a
    warning. The size of a batch is taken to be the loader's ``batch_size`` (1 if the dataset makes the batches), so all
    micro-batches weigh the same; ``drop_last=True`` on the user's loader keeps that true to the end.

    The batches of one window are read ahead, so that a window which the stream's end cuts short is weighted right.

    Args:
        loader: The user's DataLoader over an IterableDataset.
        replica: Number of this replica.
        shares: Samples of a global batch that each replica takes: all equal.
        seed: Seed of the run, the same in every process.
        micro_batches: Micro-batches of a window, or a function that returns it; read at every window.
        limit: Micro-batches after which the trainer ends an epoch; None for the whole stream.

    Attributes:
        current: Facts about the micro-batch last yielded; None before the first.

    Raises:
        DataError: for unequal shares.
    """

    def __init__(
        self,
        loader: DataLoader,
        *,
        replica: int,
        shares: Iterable[int],
        seed: int,
        micro_batches: Callable[[], int] | int,
        limit: int | None = None,
    ) -> None:
        self.current: MicroBatch | None = None
        self.limit = limit
        self._replica = replica
        self._shares = _equal_shares(shares)
        self._micro_batches = micro_batches
        self._groups = _Groups(loader, len(self._shares), seed)

    def __len__(self) -> int:
        """Micro-batches of an epoch. TypeError if the dataset does not know its length, as for a plain DataLoader."""
        return len(self._groups) // len(self._shares)

    def __iter__(self) -> Iterator[Any]:
        epoch, number, groups, yielded = self._groups.epoch, 0, iter(self._groups), 0
        while batches := self._read_window(groups, yielded):
            for index, batch in enumerate(batches):
                self.current = self._describe(epoch, number, index, len(batches))
                yield batch
            yielded += len(batches)
            number += 1

    def reshare(self, shares: Iterable[int]) -> None:
        """Accepts equal shares only; nothing changes then.

        Raises:
            DataError: for unequal shares.
        """
        self._shares = _equal_shares(shares)

    def set_epoch(self, epoch: int) -> None:
        """Passed on to the dataset's own ``set_epoch`` with the next ``iter()``."""
        self._groups.epoch = epoch

    def _read_window(self, groups: Iterator[list[Any]], yielded: int) -> list[Any]:
        """This replica's batches of the next window; an empty list at the stream's end."""
        count = self._micro_batches() if callable(self._micro_batches) else self._micro_batches
        if self.limit is not None:
            count = min(count, self.limit - yielded)
        batches: list[Any] = []
        while len(batches) < count and (group := next(groups, None)) is not None:
            if len(group) < len(self._shares):
                rank_zero_warn(
                    f"The IterableDataset ended with {len(group)} batches for {len(self._shares)} replicas: these are "
                    "dropped. Give it a number of batches that the replicas divide to use all."
                )
                break
            batches.append(group[self._replica])
        return batches

    def _describe(self, epoch: int, window: int, index: int, count: int) -> MicroBatch:
        size = nominal_batch_size(self._groups.loader) or 1
        total = size * len(self._shares) * count
        return MicroBatch(epoch, window, index, count, (), size, total, passes=(size,))

    @property
    def dataset(self) -> Any:
        return self._groups.loader.dataset

    @property
    def sampler(self) -> StreamLoader:
        """Lightning announces the epoch through ``loader.sampler.set_epoch``."""
        return self


class EvaluationStreamLoader:
    """Deals the batches of an IterableDataset's loader to the replicas for evaluation: every batch once, none dropped.

    Args:
        loader: The user's DataLoader over an IterableDataset.
        replica: Number of this replica.
        num_replicas: Number of replicas.
        seed: Seed of the run, the same in every process.
        fill: Whether a replica without a batch in the last group yields a dummy (that group's first batch).

    Attributes:
        current: Facts about the batch last yielded; None before the first.
    """

    def __init__(self, loader: DataLoader, *, replica: int, num_replicas: int, seed: int, fill: bool = True) -> None:
        self.current: MicroBatch | None = None
        self._replica = replica
        self._fill = fill
        self._groups = _Groups(loader, num_replicas, seed)

    def __len__(self) -> int:
        """Batches of this replica. TypeError if the dataset does not know its length, as for a plain DataLoader."""
        full, rest = divmod(len(self._groups), self._groups.size)
        return full + (rest > 0 if self._fill else rest > self._replica)

    def __iter__(self) -> Iterator[Any]:
        size = nominal_batch_size(self._groups.loader) or 1
        for number, group in enumerate(self._groups):
            has_own = self._replica < len(group)
            if has_own or self._fill:
                own, total = size * has_own, size * len(group)
                self.current = MicroBatch(
                    self._groups.epoch, number, 0, 1, (), own, total, is_dummy=not has_own, passes=(own,)
                )
                yield group[self._replica if has_own else 0]

    def set_epoch(self, epoch: int) -> None:
        """Passed on to the dataset's own ``set_epoch`` with the next ``iter()``."""
        self._groups.epoch = epoch

    @property
    def dataset(self) -> Any:
        return self._groups.loader.dataset

    @property
    def sampler(self) -> EvaluationStreamLoader:
        """Lightning announces the epoch through ``loader.sampler.set_epoch``."""
        return self


def _equal_shares(shares: Iterable[int]) -> tuple[int, ...]:
    counts = whole_shares(shares)
    if len(set(counts)) > 1:
        raise DataError(
            f"shares={counts} are unequal, but the batches of an IterableDataset cannot be cut: use a map-style "
            "dataset, or equal shares (every replica then takes as long as the slowest)"
        )
    return counts
