"""Column- and row-parallel linear layers on unequal shards."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ntp.layout import GroupedFamily, Replicated, Sharded
from lightning_ntp.parallel.block import BlockInput
from lightning_ntp.parallel.collectives import copy_to_slots, gather_features, split_features, sum_over_slots
from lightning_ntp.parallel.context import TensorParallelContext
from lightning_ntp.parallel.module import ParallelModule, Tied


class ColumnParallelLinear(ParallelModule):
    """``y = x A^T + b`` with the output features dealt to the slots.

    With ``heads=True`` the units are attention heads, and unmodified attention code is spared two surprises:

    * KV heads whose groups are ragged on this slot come out with one head per local query head, so that code which is
      told that its group size is 1 pairs the right heads.
    * A slot without a head computes one ghost head of zeros that no other layer reads.

    Args:
        linear: The dense layer.
        layout: Of the weight, along dim 0; the bias has the same.
        context: This member's place.
        gather_output: Return the dense output on every slot instead of the local part.
        heads: The units are attention heads.
        entry: Shared by the projections of one block.
        tied: Local parameters by dense one.
    """

    def __init__(
        self,
        linear: nn.Linear,
        layout: Sharded,
        context: TensorParallelContext,
        *,
        gather_output: bool = False,
        heads: bool = False,
        entry: BlockInput | None = None,
        tied: Tied | None = None,
    ) -> None:
        super().__init__(context)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.gather_output, self.heads, self.layout = gather_output, heads, layout
        self._entry = entry
        self.hold("weight", linear.weight, layout, tied)
        self.hold("bias", linear.bias, layout, tied)
        self.relocate()

    def relocate(self) -> None:
        """Find the segments whose KV heads must be repeated on this slot."""
        degree, slot = self.context.degree, self.context.slot
        self._is_ghost = self.heads and self.layout.local_extent(degree, slot) == 0
        self._is_ragged = False
        for index, segment in enumerate(self.layout.segments):
            family, reads = segment.family, None
            if isinstance(family, GroupedFamily) and family.local_group(degree, slot) is None:
                reads = torch.tensor(family.reads(degree, slot), device=self.weight.device)
                self._is_ragged = True
            self.register_buffer(f"_reads{index}", reads, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., local out_features), or dense ones with ``gather_output``."""
        x = self._entry.enter(x, self.context) if self._entry is not None else copy_to_slots(x, self.context)
        y = F.linear(x, self.weight, self.bias)
        if self._is_ragged:
            y = self._pair_heads(y)
        elif self._is_ghost:  # the empty sum keeps this slot in the graph: its backward must join the collectives
            width = sum(segment.sizes[0] for segment in self.layout.segments)
            y = y.sum(dim=-1, keepdim=True).expand(*y.shape[:-1], width)
        if self.gather_output:
            return gather_features(y, self.layout, self.context)
        if self.training and self._entry is not None:  # a block's row-parallel layer ends the local region
            self.context.random.enter(x.device)
        return y

    def _pair_heads(self, y: Tensor) -> Tensor:
        degree, slot = self.context.degree, self.context.slot
        widths = [segment.local_extent(degree, slot) for segment in self.layout.segments]
        parts = []
        for index, part in enumerate(y.split(widths, dim=-1)):
            reads = getattr(self, f"_reads{index}")
            if reads is not None:
                head_dim = self.layout.segments[index].sizes[0]
                part = part.unflatten(-1, (-1, head_dim)).index_select(-2, reads).flatten(-2)
            parts.append(part)
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.weight.shape[0]} of {self.out_features}"


class RowParallelLinear(ParallelModule):
    """``y = x A^T + b`` with the input features dealt to the slots; the parts of the output are summed.

    Args:
        linear: The dense layer. Its bias stays whole on every slot and is added once, after the sum.
        layout: Of the weight, along dim 1.
        context: This member's place.
        split_input: The input is dense on every slot, not the local part.
        tied: Local parameters by dense one.
    """

    def __init__(
        self,
        linear: nn.Linear,
        layout: Sharded,
        context: TensorParallelContext,
        *,
        split_input: bool = False,
        tied: Tied | None = None,
    ) -> None:
        super().__init__(context)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.split_input = split_input
        self.layout = layout
        self.hold("weight", linear.weight, layout, tied)
        self.hold("bias", linear.bias, Replicated(), tied)

    def forward(self, x: Tensor) -> Tensor:
        """(..., local in_features), or dense ones with ``split_input`` -> (..., out_features)."""
        self.context.random.leave(x.device)
        if self.split_input:
            x = split_features(x, self.layout, self.context)
        elif self.weight.shape[1] == 0:
            x = x[..., :0]  # an empty slot: a ghost head may have come in
        y = sum_over_slots(F.linear(x, self.weight), self.context)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.weight.shape[1]} of {self.in_features}, out_features={self.out_features}"
