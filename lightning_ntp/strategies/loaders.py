"""The user's loaders, wrapped for one replica."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import Trainer

from lightning_ntp.compat.lightning import active_loaders
from lightning_ntp.config import NTPConfig
from lightning_ntp.data import (
    EvaluationLoader,
    MicroBatch,
    ShareLoader,
    StreamLoader,
    nominal_batch_size,
    prepare_evaluation_loader,
    prepare_train_loader,
)
from lightning_ntp.errors import DataError
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
        self.train: ShareLoader | StreamLoader | None = None
        self._seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of a full global batch that each replica takes.

        Raises:
            DataError: before the training loader is known.
        """
        if self.train is None:
            raise DataError("shares are known once the training loader is: inside or after Trainer.fit")
        return tuple(self.train.shares)

    def wrap(self, loader: Any) -> Any:
        """The wrapper for ``loader`` in the Trainer's present stage."""
        if not self._trainer.training:
            return prepare_evaluation_loader(
                loader,
                replica=self._replica,
                num_replicas=self._topology.num_replicas,
                seed=self._seed,
                fill=not self._trainer.predicting,
            )
        self.train = prepare_train_loader(
            loader,
            replica=self._replica,
            shares=self._initial_shares(loader),
            seed=self._seed,
            micro_batches=lambda: self._trainer.accumulate_grad_batches,
            max_micro_batch=self._config.max_micro_batch,
        )
        self.train.limit = self._limit(self.train)
        return self.train

    def current_evaluation(self, dataloader_idx: int) -> MicroBatch | None:
        """Facts about the batch that the evaluation loop has in hand."""
        loaders = active_loaders(self._trainer)
        loader = loaders[dataloader_idx] if dataloader_idx < len(loaders) else None
        return loader.current if isinstance(loader, EvaluationLoader) else None

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

    def _limit(self, loader: Any) -> int | None:
        limit = self._trainer.limit_train_batches
        if isinstance(limit, int):
            return limit
        if limit is None or limit == 1.0:
            return None
        return int(len(loader) * limit)
