"""Loaders for validation, test and prediction: every sample exactly once, the same number of batches on all replicas.

No sample is padded in to make batches even. A replica that has none left runs a dummy, which its metrics must not
count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from lightning_ntp.data.batch import MicroBatch
from lightning_ntp.data.cut import cut_evenly
from lightning_ntp.data.fetch import Request
from lightning_ntp.data.order import EpochOrders, Order
from lightning_ntp.data.wrapper import FetchingWrapper
from lightning_ntp.errors import ConfigError


class EvaluationLoader(FetchingWrapper):
    """Yields the evaluation batches of one replica; the same ones on all its tensor-parallel ranks.

    Global evaluation batch j is the next ``batch_size * num_replicas`` samples in the order of the user's sampler, cut
    evenly. With a user's batch sampler it is the next ``num_replicas`` lists, one a replica. ``drop_last=True`` drops
    an incomplete last one, as the user asked.

    Args:
        loader: The user's DataLoader over a map-style dataset.
        replica: Number of this replica among the live ones.
        num_replicas: Number of live replicas.
        seed: Seed of the run, the same in every process: a shuffling sampler gives all ranks the same order.
        fill: Whether a replica without samples in a batch yields a dummy, so that all replicas run the same number of
            batches. False (prediction): it yields nothing.

    Attributes:
        current: Facts about the batch last yielded; None before the first.

    Raises:
        ConfigError: for a replica that cannot be.
        DataError: for a loader that cannot be cut.
    """

    def __init__(self, loader: DataLoader, *, replica: int, num_replicas: int, seed: int, fill: bool = True) -> None:
        super().__init__(loader, replica)
        self._place = replica_place(replica, num_replicas)
        self._fill = fill
        self._orders = EpochOrders(loader, seed)

    def __len__(self) -> int:
        """Batches of this replica, by the latest ``redeal``."""
        return sum(1 for _ in self._pieces(self._order, self._place))

    def __iter__(self) -> Iterator[Any]:
        # Workers and this loop read the pieces as they go, so they must not see a redeal.
        order, epoch, place = self._order, self._epoch, self._place
        key = (self._orders.seed, epoch)
        # A dummy loads the first sample of the global batch.
        wanted = (mine or whole[:1] for mine, whole in self._pieces(order, place))
        self._fetcher.start((Request(order.at(where), where.start, key) for where in wanted), *key)
        self._clear_seen()
        for number, (mine, whole) in enumerate(self._pieces(order, place)):
            batch = self._fetcher.fetch()
            ids = tuple(order.at(mine))
            size = len(ids)
            self.current = MicroBatch(epoch, number, 0, 1, ids, size, len(whole), is_dummy=not size, passes=(size,))
            self._note_seen(ids)
            yield batch
        self._fetcher.stop()

    def redeal(self, replica: int, num_replicas: int) -> None:
        """Deal to other live replicas from the next ``iter()`` on; a pass under way keeps its cut.

        ``len()`` is that of the next pass at once.

        Args:
            replica: Number of this replica among the live ones.
            num_replicas: Number of live replicas.

        Raises:
            ConfigError: for a replica that cannot be.
        """
        self._place = replica_place(replica, num_replicas)

    def _pieces(self, order: Order, place: tuple[int, int]) -> Iterator[tuple[range, range]]:
        """This replica's positions and all replicas' positions in every evaluation batch."""
        replica, num_replicas = place
        for bounds in self._cuts(order, num_replicas):
            mine = range(bounds[replica], bounds[replica + 1])
            if mine or self._fill:
                yield mine, range(bounds[0], bounds[-1])

    def _cuts(self, order: Order, replicas: int) -> Iterator[list[int]]:
        """For every evaluation batch the positions where the replicas' pieces begin, and its end."""
        total, ends = order.extent.total, order.extent.ends
        if ends:
            for first in range(0, len(ends), replicas):
                group = ends[first : first + replicas]
                bounds = [ends[first - 1] if first else 0, *group]
                yield bounds + [group[-1]] * (replicas - len(group))
            return
        batches = self._loader.batch_sampler
        size = batches.batch_size * replicas
        for start in range(0, total - (size - 1 if batches.drop_last else 0), size):
            sizes = cut_evenly(min(size, total - start), replicas)
            yield [start + sum(sizes[:r]) for r in range(replicas + 1)]

    @property
    def _order(self) -> Order:
        return self._orders.of(self._epoch)

    # -- what Lightning looks for on a loader, beyond the usual

    @property
    def batch_sampler(self) -> Any:
        """The user's; for prediction Lightning has wrapped it in one that tells writers the ids of every batch."""
        return self._loader.batch_sampler

    def _clear_seen(self) -> None:
        if hasattr(self.batch_sampler, "seen_batch_indices"):
            self.batch_sampler.seen_batch_indices = []

    def _note_seen(self, ids: tuple[Any, ...]) -> None:
        # Reading the order has filled it with all replicas' lists; a writer must find this replica's.
        if hasattr(self.batch_sampler, "seen_batch_indices"):
            self.batch_sampler.seen_batch_indices.append(list(ids))


def replica_place(replica: int, num_replicas: int) -> tuple[int, int]:
    """``(replica, num_replicas)``, checked.

    Raises:
        ConfigError: for a replica that is not one of them.
    """
    if not 0 <= replica < num_replicas:
        raise ConfigError(f"replica={replica} is outside 0..{num_replicas - 1}, the replicas of num_replicas")
    return replica, num_replicas
