"""The user's loaders, wrapped for one replica."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer

from lightning_ntp.compat.lightning import active_loaders
from lightning_ntp.config import NTPConfig
from lightning_ntp.data import (
    EvaluationLoader,
    EvaluationStreamLoader,
    MicroBatch,
    ShareLoader,
    StreamLoader,
    nominal_batch_size,
    prepare_evaluation_loader,
    prepare_train_loader,
)
from lightning_ntp.data.fetch import refuse_unknown_loader
from lightning_ntp.errors import DataError, UnsupportedError
from lightning_ntp.policy import check_shares, shares_by_degree
from lightning_ntp.topology import Topology


class ReplicaLoaders:
    """Wraps loaders as the Trainer asks for them.

    Args:
        trainer: The Trainer that iterates them.
        config: Shares, global batch, cap on micro-batches.
        topology: Degrees of all replicas.
        replica: This member's replica.
    """

    def __init__(self, trainer: Trainer, config: NTPConfig, topology: Topology, replica: int) -> None:
        self._trainer, self._config, self._topology, self._replica = trainer, config, topology, replica
        self.train: ShareLoader | InStep | None = None
        self._shares: tuple[int, ...] = ()
        self._accumulate = trainer.accumulate_grad_batches
        self._seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of a full global batch that each replica takes.

        Raises:
            DataError: before the training loader is known.
        """
        if self.train is None:
            raise DataError("shares are known once the training loader is: inside or after Trainer.fit")
        return tuple(getattr(self.train, "shares", self._shares))  # a stream's stay as they were given

    def wrap(self, loader: Any) -> Any:
        """The wrapper for ``loader`` in the Trainer's present stage."""
        if not self._trainer.training:
            return _in_step(
                prepare_evaluation_loader(
                    loader,
                    replica=self._replica,
                    num_replicas=self._topology.num_replicas,
                    seed=self._seed,
                    fill=not self._trainer.predicting,
                )
            )
        refuse_unknown_loader(loader)
        shares = self._initial_shares(loader)
        train = prepare_train_loader(
            loader,
            replica=self._replica,
            shares=shares,
            seed=self._seed,
            micro_batches=self._micro_batches,
            max_micro_batch=self._config.max_micro_batch,
        )
        train.limit = self._limit(train)
        self.train, self._shares = _in_step(train), shares
        return self.train

    def current_training(self) -> MicroBatch:
        """Facts about the batch that the training loop has in hand; once for each batch."""
        if isinstance(self.train, InStep):
            self.train.advance()
        return self.train.current

    def current_evaluation(self, dataloader_idx: int) -> MicroBatch | None:
        """The same for the evaluation loop."""
        loaders = active_loaders(self._trainer)
        loader = loaders[dataloader_idx] if dataloader_idx < len(loaders) else None
        if isinstance(loader, InStep):
            loader.advance()
        return loader.current if isinstance(loader, (InStep, EvaluationLoader)) else None

    def check_single(self) -> None:
        """Called when training starts.

        Raises:
            DataError: if the training data are several loaders.
        """
        if len(active_loaders(self._trainer)) > 1:
            raise DataError(
                "the training data are several loaders: only one can be cut into shares; combine the datasets "
                "(torch.utils.data.ConcatDataset, StackDataset) and return one DataLoader"
            )

    def _initial_shares(self, loader: Any) -> tuple[int, ...]:
        replicas, degrees = self._topology.num_replicas, self._topology.degrees
        batch_size = nominal_batch_size(loader)
        if batch_size is None:  # a batch sampler of the user's: shares are proportions
            return self._config.shares or degrees
        per_replica = batch_size * self._trainer.accumulate_grad_batches
        if self._config.shares is not None:
            return check_shares(self._config.shares, per_replica * replicas, replicas, self._config.global_batch)
        return shares_by_degree(per_replica, degrees, self._topology.nominal_degree, self._config.global_batch)

    def _micro_batches(self) -> int:
        if self._trainer.accumulate_grad_batches != self._accumulate:
            raise UnsupportedError(
                f"accumulate_grad_batches was changed from {self._accumulate} to "
                f"{self._trainer.accumulate_grad_batches} during fit, but shares are dealt for one number of "
                "micro-batches: set it on the Trainer, once"
            )
        return self._accumulate

    def _limit(self, loader: Any) -> int | None:
        limit = self._trainer.limit_train_batches
        if isinstance(limit, int):
            return limit
        if limit is None or limit == 1.0:
            return None
        length = sized_len(loader)
        return None if length is None else int(length * limit)  # without a length Lightning refuses a fraction


class InStep:
    """A stream's loader whose ``current`` is about the batch in use, although Lightning reads one batch ahead.

    It does so where a loader has no length, to know which batch is the last.

    Args:
        loader: Says in its ``current`` what it has yielded last. All other attributes are reached as before.

    Attributes:
        current: Facts about the batch in use; None before the first ``advance``.
    """

    def __init__(self, loader: StreamLoader | EvaluationStreamLoader) -> None:
        self.current: MicroBatch | None = None
        self._loader = loader
        self._ahead: deque[MicroBatch] = deque()

    def __iter__(self) -> Iterator[Any]:
        self._ahead.clear()
        for batch in self._loader:
            self._ahead.append(self._loader.current)
            yield batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def advance(self) -> None:
        """Go to the next batch."""
        self.current = self._ahead.popleft()


def _in_step(loader: Any) -> Any:
    return InStep(loader) if isinstance(loader, (StreamLoader, EvaluationStreamLoader)) else loader
