"""Numbers that users log: one vote a replica, weighted by samples.

The slots of a replica compute the same values; counting each would favour the replicas of higher degree.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torchmetrics import Metric

from lightning_ntp.comm.exchange import Exchange
from lightning_ntp.comm.objects import broadcast_object, gather_tensors
from lightning_ntp.compat import lightning as compat
from lightning_ntp.compat.torchmetrics import keeping_forward_value, metric_snapshot, metrics_of, restore_metric
from lightning_ntp.engine import Member
from lightning_ntp.engine.plain import Plain
from lightning_ntp.engine.survivor import Survivor
from lightning_ntp.errors import ConfigError

log = logging.getLogger(__name__)

_NAMES = {ReduceOp.SUM: "sum", ReduceOp.AVG: "mean", ReduceOp.MIN: "min", ReduceOp.MAX: "max"}
_IDENTITY = {"sum": 0.0, "min": torch.inf, "max": -torch.inf}


class ReplicaReducer:
    """Reduces values over the replicas.

    Args:
        engine: Runs collectives outside the steps.
    """

    def __init__(self, engine: Plain | Survivor) -> None:
        self._engine = engine
        self._samples: float | None = None
        self.is_alone = False

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicaReducer:
        return self  # a metric's clone() copies what it refers to

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, nothing is exchanged: for passes whose number differs between replicas."""
        self.is_alone = True
        try:
            yield
        finally:
            self.is_alone = False

    @contextmanager
    def weighted_by(self, samples: int) -> Iterator[None]:
        """Means inside count this replica's value ``samples`` times (not at all at 0); elsewhere once."""
        self._samples = float(samples)
        try:
            yield
        finally:
            self._samples = None

    def reduce(self, tensor: Tensor, reduce_op: ReduceOp | str | None = "mean") -> Tensor:
        """Reduce a tensor of any shape over the replicas; the result has its device and dtype (means of ints: float64).

        Raises:
            ConfigError: for an operation other than mean, sum, min and max.
        """
        name = _operation(reduce_op)
        if self.is_alone or self._engine.is_alone or self._is_cut_off():
            return tensor.detach().clone()
        return self._engine.outside(lambda: self._reduce(tensor, name))

    def _reduce(self, tensor: Tensor, name: str) -> Tensor:
        # float64 holds whole numbers up to 2**53 exactly, so one path serves counts and losses.
        value = tensor.detach().to("cpu", torch.float64).contiguous().clone()
        if name == "mean":
            return self._mean(value).to(tensor.device, tensor.dtype if tensor.is_floating_point() else torch.float64)
        if not self._speaks or self._samples == 0:
            value = torch.full_like(value, _IDENTITY[name])
        return self._control.all_reduce(value, op=name, tag="metrics").to(tensor.device, tensor.dtype)

    def _mean(self, value: Tensor) -> Tensor:
        weight = (1.0 if self._samples is None else self._samples) if self._speaks else 0.0
        # Not multiplied where it does not count: a dummy's value may be NaN.
        flat = value.flatten() * weight if weight else torch.zeros(value.numel(), dtype=value.dtype)
        summed = self._control.all_reduce(torch.cat([flat, flat.new_tensor([weight])]), tag="metrics")
        return (summed[:-1] / summed[-1]).view(value.shape)

    def decide(self, decision: bool, all_agree: bool) -> bool:
        """Whether all members (or any) decided yes."""

        if self._is_cut_off():
            return bool(decision)

        def ask() -> bool:
            ayes = self._control.all_reduce(torch.tensor([float(bool(decision))]), tag="decision")
            return bool(ayes == self._control.size) if all_agree else bool(ayes > 0)

        return self._engine.outside(ask)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """One tensor of each replica, in replica order; shapes may differ."""
        if self._is_cut_off():
            return [tensor] * self.num_replicas
        return self._engine.outside(lambda: gather_tensors(self._control, tensor, self._leaders))

    def broadcast(self, value: Any, source: int) -> Any:
        """The value of the member whom Lightning knows by rank ``source`` (0: the leader), on all members.

        It travels as a pickle, as in Lightning.
        """
        if self._is_cut_off():
            return value
        return self._engine.outside(
            lambda: broadcast_object(self._control, value, self._member.topology.leader_first(source))
        )

    def barrier(self) -> None:
        """Wait for all members."""
        if not self._is_cut_off():
            self._engine.outside(lambda: self._control.all_reduce(torch.zeros(1), tag="barrier"))

    @property
    def _member(self) -> Member:
        return self._engine.member

    @property
    def _control(self) -> Exchange:
        return self._member.control

    @property
    def _leaders(self) -> list[int]:
        topology = self._member.topology
        return [topology.speaker(replica) for replica in range(topology.num_replicas)]

    @property
    def _speaks(self) -> bool:
        """Whether this member tells what its replica has."""
        member = self._member
        return member.rank == member.topology.speaker(member.replica)

    def _is_cut_off(self) -> bool:
        """Whether a death has just ended all channels, and the step that was voted on is being finished."""
        if self._engine.is_between:
            log.warning(
                "a value that a hook logs or reduces before the optimizer's step is this member's own: another member "
                "died in that moment"
            )
        return self._engine.is_between

    @property
    def num_replicas(self) -> int:
        return self._member.topology.num_replicas

    def adopt_metrics(self, module: nn.Module) -> None:
        """Let the torchmetrics of a module gather one state a replica."""
        for metric in module.modules():
            if isinstance(metric, Metric) and metric.process_group is None:
                metric.dist_sync_fn = partial(_gather_states, self)
                metric.distributed_available_fn = partial(_is_distributed, self)


def _gather_states(reducer: ReplicaReducer, state: Tensor, group: Any = None) -> list[Tensor]:
    return reducer.gather(state)


def _is_distributed(reducer: ReplicaReducer) -> bool:
    return reducer.num_replicas > 1 and not reducer.is_alone


def means_everyone(group: Any) -> bool:
    """Whether a process group stands for all members: ``LightningModule.all_gather`` passes the default group."""
    return group is None or group is dist.group.WORLD


def _operation(reduce_op: ReduceOp | str | None) -> str:
    name = "sum" if reduce_op is None else _NAMES.get(reduce_op, str(reduce_op).lower())
    name = "mean" if name == "avg" else name
    if name not in ("mean", *_IDENTITY):
        raise ConfigError(f"reduce_op={reduce_op!r} is not known: use 'mean', 'sum', 'min' or 'max'")
    return name


@contextmanager
def leave_no_trace(trainer: Any, module: nn.Module) -> Iterator[None]:
    """Undo what a dummy step adds to logged values, torchmetrics and module buffers (running statistics).

    A key that the step logs for the first time stays, at its initial value: all members must sync the same keys.
    """
    logged = compat.logged_results(trainer)
    values = {key: metric_snapshot(metric) for key, metric in logged.items()}
    metrics = metrics_of(module)
    states = [metric_snapshot(metric) for metric in metrics]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    yield
    for key, result in logged.items():
        with keeping_forward_value(result):  # what the step shows, already weighted over the replicas
            if key in values:
                restore_metric(result, values[key])
            elif result.is_tensor:
                result.reset()
    for metric, state in zip(metrics, states, strict=True):
        restore_metric(metric, state)
    for buffer, before in buffers:
        buffer.data.copy_(before)  # unseen by autograd: the backward is still to come, and drops its gradients
