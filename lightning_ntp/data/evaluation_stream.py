"""Evaluation on an IterableDataset, which has no sample ids to cut by: whole batches are dealt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from lightning_ntp.data.batch import MicroBatch
from lightning_ntp.data.evaluation import replica_place
from lightning_ntp.data.stream_reader import StreamReader, read_alike, stream_batch_size
from lightning_ntp.data.wrapper import LoaderWrapper


class EvaluationStreamLoader(LoaderWrapper):
    """Deals the batches of an IterableDataset's loader to the replicas for evaluation: every batch once, none dropped.

    Args:
        loader: The user's DataLoader over an IterableDataset.
        replica: Number of this replica among the live ones.
        num_replicas: Number of live replicas.
        seed: Seed of the run, the same in every process.
        fill: Whether a replica without a batch in the last group yields a dummy (that group's first batch).

    Attributes:
        current: Facts about the batch last yielded; None before the first.

    Raises:
        ConfigError: for a replica that cannot be.
        DataError: for a loader that cannot be dealt.
    """

    def __init__(self, loader: DataLoader, *, replica: int, num_replicas: int, seed: int, fill: bool = True) -> None:
        super().__init__(loader)
        self._place = replica_place(replica, num_replicas)
        self._seed = seed
        self._fill = fill
        read_alike(loader)

    def __len__(self) -> int:
        """Batches of this replica, by the latest ``redeal``. TypeError if the dataset does not know its length."""
        replica, num_replicas = self._place
        full, rest = divmod(len(self._loader), num_replicas)
        return full + (rest > 0 if self._fill else rest > replica)

    def __iter__(self) -> Iterator[Any]:
        replica, num_replicas = self._place  # a redeal does not change the pass under way
        size, number = stream_batch_size(self._loader), 0
        reader = StreamReader(self._loader, self._seed, self._epoch)
        while group := reader.read(num_replicas):
            has_own = replica < len(group)
            if has_own or self._fill:
                own, total = size * has_own, size * len(group)
                self.current = MicroBatch(
                    self._epoch, number, 0, 1, (), own, total, is_dummy=not has_own, passes=(own,)
                )
                yield group[replica if has_own else 0]
            number += 1

    def redeal(self, replica: int, num_replicas: int) -> None:
        """Deal to other live replicas from the next ``iter()`` on, as ``EvaluationLoader.redeal`` does.

        Raises:
            ConfigError: for a replica that cannot be.
        """
        self._place = replica_place(replica, num_replicas)
