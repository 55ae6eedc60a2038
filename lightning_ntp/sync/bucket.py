"""One bucket of the gradient sync on one member: its memory, and its way between compute and sync layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_ntp.comm.exchange import Exchange
from lightning_ntp.layout import Entry, Move, Moves, ParameterLayout, Replicated, SyncPlan, plan_sync
from lightning_ntp.parallel.model import ParallelParameter
from lightning_ntp.topology import Topology


@dataclass(frozen=True)
class SyncChannels:
    """Where gradients travel; none of these is used by forward or backward.

    Attributes:
        reshard: Inside the replica.
        data_parallel: This slot of every replica; ``None`` on an extra slot.
        control: All members: the sum of weights, where these are counts. CPU tensors.
        counts: Whether this member's weight enters that sum (one member of each replica).
    """

    reshard: Exchange
    data_parallel: Exchange | None
    control: Exchange
    counts: bool

    def sum_weight(self, total: Tensor) -> None:
        """Sum the replicas' weights into ``total`` (0-dim, float64, CPU), in place."""
        if not self.counts:
            total.zero_()
        self.control.all_reduce(total, tag="weight")
        if not total:  # nobody had anything to count: all gradients are zero, and stay so
            total.fill_(1.0)


class Bucket:
    """Parameters whose gradients travel together.

    The buffer holds the local gradients one after the other, each contiguous in its own shape, so that the synced
    gradient can be handed out as a view.

    Attributes:
        number: Position in the launch order; the tag of its collectives.
        indices: Its parameters' numbers in the sync.
        in_place: Compute and sync layout are the same in all replicas: the buffer itself is summed.
    """

    def __init__(
        self,
        number: int,
        indices: Sequence[int],
        params: Sequence[ParallelParameter],
        dtype: torch.dtype,
        topology: Topology,
        rank: int,
        channels: SyncChannels,
        *,
        one_owner: bool,
    ) -> None:
        self.number, self.indices = number, tuple(indices)
        self._channels, self._tag = channels, f"bucket{number}"
        replica, self._slot = topology.place(rank)
        layouts = [param.layout for param in params]
        entries = [Entry(layout, _row_numel(param)) for param, layout in zip(params, layouts, strict=True)]
        degree, sync_degree = topology.degrees[replica], topology.sync_degree
        self.plan: SyncPlan = plan_sync(entries, degree, sync_degree, owner=number % sync_degree)
        self.in_place = topology.is_uniform and not one_owner and not _needs_reshard(layouts, degree)
        self._layouts, self._dtype, self._device = layouts, dtype, params[0].parameter.device
        self._shapes = [param.parameter.shape for param in params]
        self._filled = [False] * len(params)

    @cached_property
    def _buffer(self) -> Tensor:
        """Made when it is first needed: parameters that stay frozen cost nothing."""
        return torch.empty(sum(shape.numel() for shape in self._shapes), dtype=self._dtype, device=self._device)

    @cached_property
    def _gradients(self) -> list[Tensor]:
        parts = self._buffer.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    @cached_property
    def _rows(self) -> list[Tensor]:
        return [_rows(gradient, layout) for gradient, layout in zip(self._gradients, self._layouts, strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes of the local gradients."""
        return sum(shape.numel() for shape in self._shapes) * self._dtype.itemsize

    def reset(self) -> None:
        """Start a new window: nothing collected yet. The memory may still be seen through ``.grad``."""
        self._filled = [False] * len(self._shapes)

    def add(self, at: int, grad: Tensor, weight: float) -> None:
        """Collect ``weight * grad`` for the parameter at position ``at``."""
        if self._filled[at]:
            self._gradients[at].add_(grad, alpha=weight)
        else:
            self._gradients[at].copy_(grad).mul_(weight)
            self._filled[at] = True

    def fill_missing(self) -> None:
        """A parameter without a gradient counts as zeros."""
        for gradient, filled in zip(self._gradients, self._filled, strict=True):
            if not filled:
                gradient.zero_()

    def has_gradient(self, at: int) -> bool:
        """Whether anything was collected for the parameter at position ``at``."""
        return self._filled[at]

    def gradient(self, at: int) -> Tensor:
        """The local gradient of the parameter at position ``at``, a view of the buffer."""
        return self._gradients[at]

    def sum_over_replicas(self, total: Tensor | None) -> None:
        """Sum the buffer over the replicas, through the sync layout where layouts differ.

        Args:
            total: If given, 0-dim: the result is divided by it.
        """
        if self.in_place:
            self._sum(self._buffer)
        else:
            self._sum_in_sync_layout()
        if total is not None:
            self._buffer.div_(total.to(self._buffer.device, self._buffer.dtype))

    def _sum_in_sync_layout(self) -> None:
        mine = self.plan.slots[self._slot]
        summed = self._buffer.new_zeros(mine.numel)
        _write(summed, mine.keep, self._read(mine.keep))
        if self.plan.has_pre:
            received = self._exchange([self._read(moves) for moves in mine.give], mine.take)
            _add(summed, mine.take, received)
        self._sum(summed)
        if self.plan.has_post:
            received = self._exchange([_pick(summed, moves) for moves in mine.hand], mine.get)
            self._restore([move for moves in mine.get for move in moves], received)
        self._restore(mine.restore, _pick(summed, mine.restore))

    def _sum(self, tensor: Tensor) -> None:
        if self._channels.data_parallel is not None:
            self._channels.data_parallel.all_reduce(tensor, tag=self._tag)

    def _exchange(self, pieces: Sequence[Tensor], expected: Sequence[Moves]) -> Tensor:
        """Send a piece to each slot of the replica; returns the pieces from each, one after the other."""
        sent = [piece.numel() for piece in pieces]
        received = [_numel(moves) for moves in expected]
        return self._channels.reshard.all_to_all(torch.cat(list(pieces)), sent, received, self._tag)

    def _read(self, moves: Moves) -> Tensor:
        """Local gradient rows, flat, one move after the other."""
        rows = [self._rows[move.param].narrow(0, move.row, move.rows).reshape(-1) for move in moves]
        return torch.cat(rows) if rows else self._buffer[:0]

    def _restore(self, moves: Sequence[Move], values: Tensor) -> None:
        parts = values.split([move.numel for move in moves])
        for move, part in zip(moves, parts, strict=True):
            rows = self._rows[move.param].narrow(0, move.row, move.rows)
            rows.copy_(part.view(rows.shape))


def _needs_reshard(layouts: Sequence[ParameterLayout], degree: int) -> bool:
    """Whether any unit has several holders at ``degree``; replicated parameters sum copy by copy."""
    return any(not isinstance(layout, Replicated) and layout.is_shared(degree) for layout in layouts)


def _row_numel(param: ParallelParameter) -> int:
    if isinstance(param.layout, Replicated):
        return param.dense_numel
    return param.dense_numel // param.layout.extent


def _rows(gradient: Tensor, layout: ParameterLayout) -> Tensor:
    """A view with one row per index of the sharded dimension; a replicated tensor is one row."""
    if isinstance(layout, Replicated):
        return gradient.view(1, -1)
    return gradient.movedim(layout.dim, 0)


def _numel(moves: Moves) -> int:
    return sum(move.numel for move in moves)


def _pick(summed: Tensor, moves: Moves) -> Tensor:
    parts = [summed.narrow(0, move.offset, move.numel) for move in moves]
    return torch.cat(parts) if parts else summed[:0]


def _write(summed: Tensor, moves: Moves, values: Tensor) -> None:
    for move, part in zip(moves, values.split([move.numel for move in moves]), strict=True):
        summed.narrow(0, move.offset, move.numel).copy_(part)


def _add(summed: Tensor, taken: Sequence[Moves], values: Tensor) -> None:
    """Add what came from each slot, in slot order: the sum has one order on every replica."""
    moves = [move for moves in taken for move in moves]
    for move, part in zip(moves, values.split([move.numel for move in moves]), strict=True):
        summed.narrow(0, move.offset, move.numel).add_(part)
