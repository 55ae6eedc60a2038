"""Where parameters are used: on replicated values, or inside a local region.

Between a column- and a row-parallel layer every slot has values of its own. The gradient of a replicated parameter that
acts there (``nn.PReLU`` in a feed-forward module, a learned scale of attention scores) is a part of the sum on each
slot; outside it is whole on each. Taken for the other kind the slots' copies would drift apart, or the gradient be too
large, and nothing would tell. The graph of a loss shows which it is.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_ntp.errors import PlanError
from lightning_ntp.layout import Replicated
from lightning_ntp.parallel.model import ParallelModel, ParallelParameter
from lightning_ntp.parallel.plan import generalize

# Seen from the loss, a region begins where slots' values were put together, and ends where a replicated value came in.
_BEGINS = {"_SumOverSlotsBackward", "_GatherFeaturesBackward", "_ParallelLogSoftmaxLossBackward"}
_ENDS = {"_CopyToSlotsBackward", "_SplitFeaturesBackward"}


def check_partial_grads(loss: Tensor, model: ParallelModel) -> None:
    """Check every replicated parameter under ``loss`` against what the plan says of its gradient.

    At degree 1 there is nothing to confuse.

    Raises:
        PlanError: names the parameter, and what the plan must say.
    """
    if model.context.degree == 1:
        return
    uses = _uses(loss.grad_fn)
    for param in model.parameters():
        if isinstance(param.layout, Replicated):
            _check(param, param.layout.partial_grad, uses.get(param.parameter, set()))


def _uses(root: Any) -> dict[nn.Parameter, set[bool]]:
    """For each parameter in a graph whether it is used in a region (True), outside (False), or both."""
    found: dict[nn.Parameter, set[bool]] = {}
    pending = [(root, False)]
    seen = set(pending)
    while pending:
        node, is_local = pending.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):
            found.setdefault(node.variable, set()).add(is_local)
        name = node.name()
        is_local = name in _BEGINS or (is_local and name not in _ENDS)
        new = {(edge, is_local) for edge, _ in node.next_functions} - seen
        seen |= new
        pending.extend(new)
    return found


def _check(param: ParallelParameter, is_partial: bool, uses: set[bool]) -> None:
    if uses <= {is_partial}:
        return
    module, _, attribute = param.name.rpartition(".")
    shown = f"parameter {param.name!r} of shape {tuple(param.dense_shape)}"
    if len(uses) == 2:
        raise PlanError(
            f"{shown} is used both on replicated values and on local ones (between a column- and a row-parallel "
            "layer), so its gradient is neither whole nor a part on each slot: use two parameters, or leave the block "
            "that it acts in out of the plan"
        )
    if is_partial:
        raise PlanError(
            f"{shown} is used on replicated values, where its gradient is whole on every slot, but partial_grad=True "
            f"was taken from the plan or its name: drop it from the plan, or give the module {module!r} another name"
        )
    raise PlanError(
        f"{shown} is used on local values, between a column- and a row-parallel layer: each slot has a part of its "
        f"gradient only. Add {generalize(module)!r}: 'replicate(partial_grad=True)' to the plan (where that module is "
        f"a block of the plan itself, first put {attribute!r} into a module of its own inside it)"
    )
