"""Vocabulary-parallel embedding and cross entropy: every slot holds some rows of the table and the same logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_ntp.errors import PlanError
from lightning_ntp.layout import Sharded, merge_rows
from lightning_ntp.parallel.collectives import sum_over_slots
from lightning_ntp.parallel.context import TensorParallelContext
from lightning_ntp.parallel.linear import ColumnParallelLinear
from lightning_ntp.parallel.module import ParallelModule, Tied


def local_index(layout: Sharded, context: TensorParallelContext, device: torch.device) -> Tensor:
    """(vocabulary,) long: each token's local row, -1 where another slot holds it."""
    index = torch.full((layout.extent,), -1, dtype=torch.long, device=device)
    for dense_row, local_row, rows in merge_rows(layout.pieces(context.degree, context.slot)):
        index[dense_row : dense_row + rows] = torch.arange(local_row, local_row + rows, device=device)
    return index


def _local_rows(index: Tensor, tokens: Tensor) -> Tensor:
    # Not index[tokens]: a token of -1 would be the last one, where the dense layer raises.
    return index.index_select(0, tokens.flatten()).view(tokens.shape)


class VocabParallelEmbedding(ParallelModule):
    """A table whose rows are dealt to the slots; the looked-up vectors are summed (all but one are zero).

    Raises:
        PlanError: if the dense table uses ``max_norm``, ``scale_grad_by_freq`` or ``sparse``.
    """

    def __init__(
        self,
        embedding: nn.Embedding,
        layout: Sharded,
        context: TensorParallelContext,
        *,
        tied: Tied | None = None,
    ) -> None:
        super().__init__(context)
        if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
            raise PlanError(
                "an embedding with max_norm, scale_grad_by_freq or sparse=True cannot be sharded over the vocabulary; "
                "give it the style 'replicate' or drop the option"
            )
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx = embedding.padding_idx
        self.layout = layout
        self.hold("weight", embedding.weight, layout, tied)
        self.register_buffer("_index", torch.empty(0, dtype=torch.long), persistent=False)
        self.relocate()

    def relocate(self) -> None:
        self._index = local_index(self.layout, self.context, self.weight.device)

    def forward(self, tokens: Tensor) -> Tensor:
        """(...) long -> (..., embedding_dim)."""
        local = _local_rows(self._index, tokens)
        held = local >= 0
        if self.weight.shape[0]:
            vectors = F.embedding(local.clamp(min=0), self.weight)
        else:  # an empty slot still takes part, in the sum and in the graph
            vectors = self.weight.new_zeros(*tokens.shape, self.embedding_dim) + self.weight.sum()
        vectors = torch.where(held.unsqueeze(-1), vectors, torch.zeros_like(vectors))
        if self.padding_idx is not None:  # its vector counts, its gradient does not
            vectors = torch.where((tokens == self.padding_idx).unsqueeze(-1), vectors.detach(), vectors)
        return sum_over_slots(vectors, self.context)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]} of {self.num_embeddings}, {self.embedding_dim}"


class _ParallelLogSoftmaxLoss(torch.autograd.Function):
    """Loss of every token from local logits, with three small sums over the slots instead of the dense logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, local_target: Tensor, context: TensorParallelContext) -> Tensor:
        exchange = context.exchange
        is_empty = not logits.shape[-1]
        largest = logits.new_full(logits.shape[:-1], -torch.inf) if is_empty else logits.amax(dim=-1)
        shifted = logits - exchange.all_reduce(largest, op="max", tag="forward").unsqueeze(-1)
        exponentials = shifted.exp()
        held = local_target >= 0
        sums = torch.stack([exponentials.sum(dim=-1), _pick(shifted, local_target, held)])
        total, target_logit = exchange.all_reduce(sums, tag="forward").unbind()
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), local_target, held)
        return total.log() - target_logit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        probabilities, local_target, held = ctx.saved_tensors
        grad_logits = probabilities * grad.unsqueeze(-1)
        if probabilities.shape[-1]:
            at_target = torch.where(held, -grad, torch.zeros_like(grad)).unsqueeze(-1)
            grad_logits.scatter_add_(-1, local_target.clamp(min=0).unsqueeze(-1), at_target)
        return grad_logits, None, None


def _pick(logits: Tensor, local_target: Tensor, held: Tensor) -> Tensor:
    if not logits.shape[-1]:
        return logits.new_zeros(logits.shape[:-1])
    picked = logits.gather(-1, local_target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(held, picked, torch.zeros_like(picked))


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    head: nn.Module,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy of local logits, without gathering them.

    Works unchanged in a dense run, where ``head`` is an ``nn.Linear``.

    Args:
        logits: (..., local vocabulary), the output of ``head``. Computed in float32 at least.
        target: (...) long, dense token ids.
        head: The layer that made the logits.
        ignore_index: Targets that do not count.
        reduction: ``"mean"`` over the targets that count, ``"sum"`` or ``"none"``.

    Raises:
        PlanError: if ``head`` already gathers its output.
    """
    if not isinstance(head, ColumnParallelLinear):
        losses = F.cross_entropy(
            logits.flatten(0, -2), target.flatten(), ignore_index=ignore_index, reduction=reduction
        )
        return losses.view(target.shape) if reduction == "none" else losses
    if head.gather_output:
        raise PlanError(
            "head gathers its output: give it the style 'vocab', or use torch's cross_entropy on its logits"
        )
    counts = target != ignore_index
    index = local_index(head.layout, head.context, logits.device)
    local_target = _local_rows(index, torch.where(counts, target, torch.zeros_like(target)))
    exact = logits if logits.dtype == torch.float64 else logits.float()
    losses = _ParallelLogSoftmaxLoss.apply(exact, local_target, head.context)
    losses = torch.where(counts, losses, torch.zeros_like(losses))
    if reduction == "none":
        return losses
    return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()
