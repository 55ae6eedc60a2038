"""A model of which this member holds a part: what lies where, by parameter name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_ntp.layout import ParameterLayout, Replicated
from lightning_ntp.parallel.context import TensorParallelContext
from lightning_ntp.parallel.localize import LocalHeads
from lightning_ntp.parallel.module import ParallelModule
from lightning_ntp.parallel.shards import local_shape


@dataclass(frozen=True)
class ParallelParameter:
    """One local parameter.

    Attributes:
        name: As in ``named_parameters`` of the model (a tied one has its first name).
        parameter: The local tensor; its identity never changes.
        layout: How the dense tensor lies on the slots.
        dense_shape: Shape of the dense tensor.
    """

    name: str
    parameter: nn.Parameter
    layout: ParameterLayout
    dense_shape: torch.Size

    @property
    def dense_numel(self) -> int:
        return self.dense_shape.numel()

    def local_shape(self, degree: int, slot: int) -> torch.Size:
        return local_shape(self.dense_shape, self.layout, degree, slot)


@dataclass
class ParallelModel:
    """What ``parallelize`` made of a model.

    Attributes:
        module: The model itself.
        context: This member's place.
        local_heads: Attention modules whose head counts follow the slot.
        partial_modules: Replicated modules whose gradients are partial on each slot.
        blocks: Names of attention and feed-forward modules, for the shape check.
    """

    module: nn.Module
    context: TensorParallelContext
    local_heads: list[LocalHeads] = field(default_factory=list)
    partial_modules: list[nn.Module] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)

    def parameters(self) -> Iterator[ParallelParameter]:
        """Every parameter once, in the order of ``named_parameters``: the same on all members."""
        seen: set[nn.Parameter] = set()
        partial = {id(module) for block in self.partial_modules for module in block.modules()}
        for prefix, module in self.module.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter in seen:
                    continue
                seen.add(parameter)
                layout: ParameterLayout = Replicated(partial_grad=id(module) in partial)
                shape = parameter.shape
                if isinstance(module, ParallelModule):
                    layout, shape = module.layouts[name], module.dense_shapes[name]
                yield ParallelParameter(f"{prefix}.{name}" if prefix else name, parameter, layout, shape)

    def replicated_tensors(self) -> list[Tensor]:
        """Parameters and buffers that every slot holds whole."""
        whole: list[Tensor] = [each.parameter for each in self.parameters() if isinstance(each.layout, Replicated)]
        for module in self.module.modules():
            if not isinstance(module, ParallelModule):
                whole += module.buffers(recurse=False)
        return whole

    def relocate(self) -> None:
        """Let modules follow the context after it changed."""
        for module in self.module.modules():
            if isinstance(module, ParallelModule):
                module.relocate()
        for heads in self.local_heads:
            heads.relocate(self.context)
