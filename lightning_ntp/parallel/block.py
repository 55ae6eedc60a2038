"""One sum for all column-parallel projections of a block.

q, k and v (gate and up) read the same input. Each would sum its part of that input's gradient over the slots; sharing
the entry makes it one collective instead of three.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_ntp.parallel.collectives import copy_to_slots
from lightning_ntp.parallel.context import TensorParallelContext


class BlockInput:
    """Remembers the last tensor that entered a block, until the block's forward ends."""

    def __init__(self) -> None:
        self._source: Tensor | None = None
        self._entered: Tensor | None = None

    def enter(self, x: Tensor, context: TensorParallelContext) -> Tensor:
        """``copy_to_slots(x)``, the same tensor again for the same input object."""
        if context.degree == 1:
            return x
        needs_graph = x.requires_grad and torch.is_grad_enabled()  # what was made under no_grad has none
        if self._source is not x or self._entered is None or self._entered.requires_grad != needs_graph:
            self._source, self._entered = x, copy_to_slots(x, context)
        return self._entered

    def clear(self) -> None:
        self._source = self._entered = None

    def attach(self, block: nn.Module) -> None:
        """Forget at both ends of ``block``'s forward: no activation outlives it, and no recompute meets a stale one."""
        block.register_forward_pre_hook(lambda *_: self.clear())
        block.register_forward_hook(lambda *_: self.clear(), always_call=True)
