"""Collectives inside a replica that autograd knows the gradient of.

The pairs of tensor parallelism (Shoeybi et al. 2019, Megatron-LM, section 3): what is the identity forward is a sum
backward, and the other way round. All act on the exchange that the context holds when they run. Their gradients are
made of the same functions, so that gradients of gradients (``create_graph=True``) are right too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ntp.layout import Sharded, merge_rows
from lightning_ntp.parallel.context import TensorParallelContext


class _CopyToSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: TensorParallelContext) -> Tensor:
        ctx.context = context
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _SumOverSlots.apply(grad, ctx.context, "backward"), None


class _SumOverSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: TensorParallelContext, tag: str) -> Tensor:
        ctx.context = context
        # A copy: autograd, or the user, may share the incoming memory.
        return context.exchange.all_reduce(x.clone(memory_format=torch.contiguous_format), tag=tag)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _CopyToSlots.apply(grad, ctx.context), None, None


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Sharded, context: TensorParallelContext) -> Tensor:
        ctx.layout, ctx.context = layout, context
        degree = context.degree
        rows = [layout.local_extent(degree, slot) for slot in range(degree)]
        parts = context.exchange.all_gather_uneven(x.movedim(-1, 0).contiguous(), rows, tag="forward")
        dense = x.new_empty(layout.extent, *x.shape[:-1])
        for slot, part in enumerate(parts):
            for dense_row, local_row, count in merge_rows(layout.pieces(degree, slot)):
                dense[dense_row : dense_row + count] = part[local_row : local_row + count]
        return dense.movedim(0, -1).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _SplitFeatures.apply(grad, ctx.layout, ctx.context), None, None


class _SplitFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Sharded, context: TensorParallelContext) -> Tensor:
        ctx.layout, ctx.context = layout, context
        return _own_features(x, layout, context)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _GatherFeatures.apply(grad, ctx.layout, ctx.context), None, None


def _own_features(dense: Tensor, layout: Sharded, context: TensorParallelContext) -> Tensor:
    runs = merge_rows(layout.pieces(context.degree, context.slot))
    parts = [dense[..., row : row + count] for row, _, count in runs]
    return torch.cat(parts, dim=-1) if parts else dense[..., :0].contiguous()


def copy_to_slots(x: Tensor, context: TensorParallelContext) -> Tensor:
    """Enter a column-parallel region: identity; the gradient is summed over the slots."""
    return x if context.degree == 1 else _CopyToSlots.apply(x, context)


def sum_over_slots(x: Tensor, context: TensorParallelContext) -> Tensor:
    """Leave a row-parallel region: sum over the slots; the gradient passes unchanged."""
    return x if context.degree == 1 else _SumOverSlots.apply(x, context, "forward")


def gather_features(x: Tensor, layout: Sharded, context: TensorParallelContext) -> Tensor:
    """(..., local features) -> (..., dense features), in dense order. Each slot keeps its part of the gradient.

    Right where every slot computes the same afterwards, so that the gradients of the dense tensor are equal. Not the
    identity at degree 1 either: a slot's units lie in the order in which they arrived.
    """
    return _GatherFeatures.apply(x, layout, context)


def split_features(x: Tensor, layout: Sharded, context: TensorParallelContext) -> Tensor:
    """(..., dense features) -> (..., local features); the gradient is gathered."""
    return _SplitFeatures.apply(x, layout, context)
