"""torch's ``ColwiseParallel`` and ``RowwiseParallel`` objects, as used with ``parallelize_module``, translated.

Only the objects are read, never applied: they would make DTensors, whose shards are cut by ``torch.chunk``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_ntp.errors import PlanError
from lightning_ntp.parallel.plan import ParallelPlan
from lightning_ntp.parallel.plans.pairs import join
from lightning_ntp.parallel.styles import Replicate, Style

ORIGIN = "the plan of torch styles"


def is_torch_style(value: Any) -> bool:
    """Whether ``value`` is one of torch's parallel style objects."""
    from torch.distributed.tensor.parallel import ParallelStyle

    return isinstance(value, ParallelStyle)


def styles_of(plan: Mapping[str, Any], model: nn.Module) -> dict[str, Style]:
    """Module name -> style.

    Args:
        plan: Patterns of module names -> torch's style objects.
        model: The dense model; head counts come from its modules' attributes or a config.

    Raises:
        PlanError: if a pattern names nothing, a style has no counterpart, or head counts can't be known.
    """
    modules = dict(model.named_modules())
    kinds: dict[str, str] = {}
    for pattern, style in plan.items():
        for name in ParallelPlan({pattern: Replicate()}).match(model):
            kinds[name] = _kind(pattern, style, modules[name])
    return join(kinds, model, ORIGIN)


def _kind(pattern: str, style: Any, module: nn.Module) -> str:
    from torch.distributed.tensor import Replicate as Whole
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
        raise PlanError(
            f"plan[{pattern!r}] is a {type(style).__name__}, which has no counterpart here; there are ColwiseParallel "
            "and RowwiseParallel, and styles such as 'colwise', 'replicate': leave the entry out or write one of these"
        )
    enters, leaves = style.input_layouts[0], style.output_layouts[0]
    whole, local = Whole(), Shard(-1)
    if isinstance(module, nn.Embedding) and (enters, leaves) == (whole, whole):
        return "vocab"
    if isinstance(style, ColwiseParallel) and enters == whole and leaves in (whole, local):
        return "colwise_gather_output" if leaves == whole else "colwise"
    if isinstance(style, RowwiseParallel) and enters in (whole, local) and leaves == whole:
        return "rowwise_split_input" if enters == whole else "rowwise"
    raise PlanError(
        f"plan[{pattern!r}] = {type(style).__name__}(input_layouts={enters}, output_layouts={leaves}): "
        "sequence-parallel layouts are not supported; inputs and outputs are Replicate(), or Shard(-1) between a "
        "column- and a row-parallel layer"
    )
