"""The right wrapper for a user's loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.utils.data import IterableDataset

from lightning_ntp.data.evaluation import EvaluationLoader
from lightning_ntp.data.evaluation_stream import EvaluationStreamLoader
from lightning_ntp.data.fetch import refuse_unknown_loader
from lightning_ntp.data.loader import ShareLoader
from lightning_ntp.data.stream import StreamLoader


def prepare_train_loader(
    loader: Any,
    *,
    replica: int,
    shares: Iterable[int],
    seed: int,
    micro_batches: Callable[[], int] | int,
    max_micro_batch: int | None = None,
    limit: int | None = None,
) -> ShareLoader | StreamLoader:
    """Wrap the user's training loader for one replica. For the arguments see ``ShareLoader``.

    Raises:
        ConfigError: for shares, a replica or a cap that cannot be.
        DataError: for a loader that cannot be cut, with the way out.
    """
    refuse_unknown_loader(loader)
    if not isinstance(loader.dataset, IterableDataset):
        return ShareLoader(
            loader,
            replica=replica,
            shares=shares,
            seed=seed,
            micro_batches=micro_batches,
            max_micro_batch=max_micro_batch,
            limit=limit,
        )
    if max_micro_batch is not None:
        rank_zero_warn(f"max_micro_batch={max_micro_batch} has no effect: an IterableDataset's batches are not split.")
    return StreamLoader(loader, replica=replica, shares=shares, seed=seed, micro_batches=micro_batches, limit=limit)


def prepare_evaluation_loader(
    loader: Any, *, replica: int, num_replicas: int, seed: int, fill: bool
) -> EvaluationLoader | EvaluationStreamLoader:
    """Wrap the user's validation, test or prediction loader for one replica. Arguments as in ``EvaluationLoader``.

    Raises:
        DataError: for a loader that cannot be cut, with the way out.
    """
    refuse_unknown_loader(loader)
    kind = EvaluationStreamLoader if isinstance(loader.dataset, IterableDataset) else EvaluationLoader
    return kind(loader, replica=replica, num_replicas=num_replicas, seed=seed, fill=fill)
