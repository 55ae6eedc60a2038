"""Run blocks on tensors without data at every degree and slot, to find shapes that somebody wrote down.

A model may fit the degree it starts with and fail at the one that a lost GPU leaves behind. So before the first forward
of each kind of block goes on, the block runs on meta tensors at every place that may be reached (section "Modules" of
the design): a ``view`` with a number of heads that does not follow the slot is found now, with the module's name.

Nothing real is touched: the block is cloned, inputs are copied without data, random generators are put back. A block
that does not run on meta tensors even when dense (``.item()``, a foreign kernel) is skipped with a log line.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_ntp.errors import PlanError
from lightning_ntp.parallel.linear import ColumnParallelLinear, RowParallelLinear
from lightning_ntp.parallel.model import ParallelModel
from lightning_ntp.parallel.plan import generalize
from lightning_ntp.parallel.probing.clone import MetaClone, Place, places
from lightning_ntp.parallel.probing.meta_mode import HardCodedShape, code_line

log = logging.getLogger(__name__)


class ShapeProbe:
    """Checks the blocks of a model, the first one of each pattern, when they first run.

    Args:
        model: What ``parallelize`` made.
    """

    def __init__(self, model: ParallelModel) -> None:
        self._model = model
        self._handles: dict[str, Any] = {}

    def attach(self) -> None:
        """Wait for the first forward of each block; costs nothing after that.

        That forward raises a PlanError if the block has a shape that does not follow the slot.
        """
        for name in self._targets():
            block = self._model.module.get_submodule(name)
            hook = _first_call(self, name)
            self._handles[name] = block.register_forward_pre_hook(hook, with_kwargs=True)

    def remove(self) -> None:
        """Stop waiting."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def run(self, *args: Any, **kwargs: Any) -> bool:
        """Check now, with inputs of the whole model.

        Returns:
            Whether the model could run on meta tensors, so that its blocks were checked.

        Raises:
            PlanError: if a block has a shape that does not follow the slot.
        """
        clone = MetaClone(self._model, self._model.module, None)
        seen: dict[str, tuple[tuple, Mapping[str, Any]]] = {}
        for name in self._targets():
            clone.of(self._model.module.get_submodule(name)).register_forward_pre_hook(
                # A copy: what the model does with a cache or a list afterwards must not reach the check.
                lambda _, a, k, name=name: seen.setdefault(name, copy.deepcopy((a, k))) and None, with_kwargs=True
            )
        try:
            clone.run(args, kwargs)
        except Exception as error:
            log.info("the shapes of %s could not be checked beforehand: %s", type(self._model.module).__name__, error)
            return False
        for name, (block_args, block_kwargs) in seen.items():
            self.check(name, block_args, block_kwargs)
        return True

    def check(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Run the block ``name`` on meta tensors, dense and at every place.

        Raises:
            PlanError: if it runs dense and fails somewhere else, or its output has another shape there.
        """
        block = self._model.module.get_submodule(name)
        try:
            dense = _first_shape(MetaClone(self._model, block, None).run(args, kwargs))
        except Exception as error:
            log.warning(
                "the shapes of %r could not be checked for other degrees: it does not run on meta tensors (%s: %s)",
                name, type(error).__name__, _one_line(error),
            )  # fmt: skip
            return
        for place in places(self._model, block):
            clone = MetaClone(self._model, block, place)
            try:
                local = _first_shape(clone.run(args, kwargs))
            except Exception as error:
                raise PlanError(_explain(name, block, place, error)) from error
            if local != dense:
                problem = f"its output has the shape {local}, dense {dense}"
                raise PlanError(_explain(name, block, place, problem))

    def _call(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> None:
        self._handles.pop(name).remove()
        self.check(name, args, kwargs)

    def _targets(self) -> list[str]:
        """The first module of each pattern among the blocks and the other modules with local tensors inside."""
        first: dict[str, str] = {}
        for name in (*self._model.blocks, *self._open_parents()):
            first.setdefault(generalize(name), name)
        return list(first.values())

    def _open_parents(self) -> list[str]:
        blocks = tuple(f"{name}." for name in self._model.blocks)
        parents = []
        for name, module in self._model.module.named_modules():
            is_open = (isinstance(module, ColumnParallelLinear) and not module.gather_output) or (
                isinstance(module, RowParallelLinear) and not module.split_input
            )
            parent = name.rpartition(".")[0]
            if is_open and parent and parent not in parents and not name.startswith(blocks):
                parents.append(parent)
        return parents


def _first_call(probe: ShapeProbe, name: str):
    return lambda _, args, kwargs: probe._call(name, args, kwargs)


def _explain(name: str, block: nn.Module, place: Place, problem: Exception | str) -> str:
    where = "" if isinstance(problem, str) else code_line(problem)
    text = problem if isinstance(problem, str) else _one_line(problem)
    kind = "" if isinstance(problem, (str, HardCodedShape)) else f"{type(problem).__name__}: "
    return (
        f"{name!r} ({type(block).__name__}) does not follow the slot: at degree {place.degree}, slot {place.slot} of "
        f"tensor_parallel_size={place.nominal_degree}, {kind}{text}{where}. Write no number of heads or columns into a "
        "shape: use view(..., -1, head_dim), or an attribute that the plan lists, as in "
        "'attention(num_heads=..., localize={\"n_heads\": \"heads\"})'"
    )


def _first_shape(output: Any) -> tuple[int, ...] | None:
    """Shape of the first tensor of an output. Others, such as attention weights or caches, may be local."""
    if isinstance(output, Tensor):
        return tuple(output.shape)
    if isinstance(output, Mapping):
        output = list(output.values())
    elif not isinstance(output, (list, tuple)):
        output = list(vars(output).values()) if hasattr(output, "__dict__") else []
    return next((shape for part in output if (shape := _first_shape(part)) is not None), None)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


