"""Base of the modules that hold a part of their parameters."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from lightning_ntp.compat.modules import has_gradient_hooks
from lightning_ntp.errors import PlanError
from lightning_ntp.layout import ParameterLayout
from lightning_ntp.parallel.context import TensorParallelContext
from lightning_ntp.parallel.shards import local_shape, take_local

# Dense parameter -> its local part and layout.
Tied = dict[nn.Parameter, tuple[nn.Parameter, ParameterLayout]]


class ParallelModule(nn.Module):
    """A module whose parameters are local parts of dense ones.

    Its ``state_dict`` keys are those of the dense module it replaces; the values are local.

    Attributes:
        context: This member's place, shared by all modules of the model.
        layouts: Layout of each parameter, by its name in this module.
        dense_shapes: Shape of each parameter's dense tensor.
    """

    def __init__(self, context: TensorParallelContext) -> None:
        super().__init__()
        self.context = context
        self.register_state_dict_pre_hook(_warn_of_parts)
        self.layouts: dict[str, ParameterLayout] = {}
        self.dense_shapes: dict[str, torch.Size] = {}

    def hold(
        self,
        name: str,
        dense: nn.Parameter | None,
        layout: ParameterLayout,
        tied: Tied | None = None,
    ) -> None:
        """Register the local part of ``dense`` as parameter ``name``.

        Args:
            name: Its name in this module.
            dense: The dense parameter; ``None`` (no bias) is registered as such.
            layout: How it lies on the slots.
            tied: Local parameters by dense one: a tensor tied to another module stays tied.

        Raises:
            PlanError: if the other module shards the tensor in another way, or it has gradient hooks.
        """
        if dense is None:
            self.register_parameter(name, None)
            return
        tied = {} if tied is None else tied
        if dense not in tied:
            tied[dense] = self._cut(name, dense, layout), layout
        parameter, first_layout = tied[dense]
        if first_layout != layout:
            raise PlanError(
                f"a tied {name} of shape {tuple(dense.shape)} is sharded in two ways: give both modules a style over "
                "the same dimension, such as 'vocab' and 'colwise(gather_output=True)', or replicate both"
            )
        self.register_parameter(name, parameter)
        self.layouts[name], self.dense_shapes[name] = layout, dense.shape

    def _cut(self, name: str, dense: nn.Parameter, layout: ParameterLayout) -> nn.Parameter:
        if has_gradient_hooks(dense):
            raise PlanError(
                f"a {name} of shape {tuple(dense.shape)} that the plan shards has gradient hooks, which its local part "
                "would not have: register them in on_fit_start, where they see that part, or leave its module whole"
            )
        local = take_local(dense.detach(), layout, self.context.degree, self.context.slot)
        parameter = nn.Parameter(local, requires_grad=dense.requires_grad)
        vars(parameter).update(vars(dense))  # marks, such as "no weight decay"
        return parameter

    def local_shape(self, name: str, degree: int, slot: int) -> torch.Size:
        """Shape of a parameter at another place."""
        return local_shape(self.dense_shapes[name], self.layouts[name], degree, slot)

    def relocate(self) -> None:
        """Recompute what depends on the place, after the context has changed. Parameters are moved by others."""


def _warn_of_parts(module: ParallelModule, prefix: str, keep_vars: bool) -> None:
    """A file made of it would lack the other slots' parts; who asks for the tensors themselves knows what they are."""
    if not keep_vars and module.context.slot == 0:
        warnings.warn(
            "state_dict() of a sharded model holds this member's part of the weights, not the dense tensors: to save "
            "the model, call trainer.save_checkpoint(path) on all members",
            stacklevel=2,
        )
