"""Values over the replicas, as the Trainer and the user's code ask the strategy for them."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed import ReduceOp
from typing_extensions import override

from lightning_ntp.strategies import checks
from lightning_ntp.strategies.metrics import ReplicaReducer, means_everyone


class ReplicaValues(ModelParallelStrategy):
    """The part of the strategy that exchanges values: one vote a replica, and through failures."""

    _reducer: ReplicaReducer | None = None

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        if not means_everyone(group):
            return super().reduce(tensor, group, reduce_op)
        return tensor if self._reducer is None else self._reducer.reduce(tensor, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return bool(decision) if self._reducer is None else self._reducer.decide(decision, all)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """(replicas, ...): one tensor of each replica."""
        if not means_everyone(group) or self._reducer is None:
            return super().all_gather(tensor, group, sync_grads)
        checks.check_all_gather(sync_grads, self._reducer.is_alone)
        return torch.stack(self._reducer.gather(tensor))

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The leader's object (``src=0``), or that of another rank, on all members."""
        return obj if self._reducer is None else self._reducer.broadcast(obj, src)

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._reducer is not None:
            self._reducer.barrier()
