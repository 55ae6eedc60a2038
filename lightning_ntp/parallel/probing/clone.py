"""A block without data, as it would be at another place."""

from __future__ import annotations

import collections
import contextlib
import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ntp.parallel.block import BlockInput
from lightning_ntp.parallel.context import TensorParallelContext
from lightning_ntp.parallel.linear import ColumnParallelLinear
from lightning_ntp.parallel.localize import LocalHeads
from lightning_ntp.parallel.model import ParallelModel
from lightning_ntp.parallel.module import ParallelModule
from lightning_ntp.parallel.probing.meta_mode import Cuts, MetaMode
from lightning_ntp.parallel.vocabulary import VocabParallelEmbedding

_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict)
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


class ShapeExchange:
    """Stands for an ``Exchange``: results have the right shapes and nothing moves."""

    def __init__(self, slot: int, degree: int) -> None:
        self.rank, self.size = slot, degree

    def all_reduce(self, tensor: Tensor, op: str = "sum", tag: str = "") -> Tensor:
        return tensor

    def all_to_all(self, send: Tensor, send_numels: Sequence[int], recv_numels: Sequence[int], tag: str = "") -> Tensor:
        return send.new_empty(sum(recv_numels))

    def all_gather_uneven(self, local: Tensor, rows: Sequence[int], tag: str = "") -> list[Tensor]:
        return [local.new_empty(count, *local.shape[1:]) for count in rows]

    def broadcast(self, tensor: Tensor, source: int, tag: str = "") -> Tensor:
        return tensor


@dataclass(frozen=True)
class Place:
    """A slot of a replica of some degree."""

    degree: int
    slot: int
    nominal_degree: int


def places(model: ParallelModel, block: nn.Module) -> list[Place]:
    """Every reachable place at which ``block`` looks different: one each of equal local shapes and head counts.

    The highest degree comes first.
    """
    held = [(m, name) for m in block.modules() if isinstance(m, ParallelModule) for name in m.dense_shapes]
    heads = [local for local in model.local_heads if any(local.module is module for module in block.modules())]
    found: dict[tuple, Place] = {}
    for degree in model.context.degrees:
        for slot in range(degree):
            shapes = tuple(module.local_shape(name, degree, slot) for module, name in held)
            groups = tuple(local.family.local_group(degree, slot) for local in heads)
            found.setdefault((shapes, groups), Place(degree, slot, model.context.nominal_degree))
    return list(found.values())


class MetaClone:
    """A copy of a module on the meta device.

    Modules and the containers among their attributes are copied; hooks are not. The rest is shared and only read.

    Args:
        model: The model that holds the module.
        module: What to copy.
        place: Where; None for the dense module.
    """

    def __init__(self, model: ParallelModel, module: nn.Module, place: Place | None) -> None:
        self._context: TensorParallelContext | None = None
        if place is not None:
            exchange: Any = ShapeExchange(place.slot, place.degree)
            self._context = replace(model.context, degree=place.degree, slot=place.slot, exchange=exchange)
        self._copies: dict[int, nn.Module] = {}
        self._entries: dict[int, BlockInput] = {}
        with torch.device("meta"):
            self.module = self._clone(module)
            self._localize(model.local_heads)

    def of(self, module: nn.Module) -> nn.Module:
        """The copy of a module."""
        return self._copies[id(module)]

    def run(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Its output on inputs without data. Inputs are copied; gradients and random generators stay as they are."""
        mode = MetaMode()
        for module in self._copies.values():
            if isinstance(module, ColumnParallelLinear) and module.heads:
                module.register_forward_hook(_follower(mode, _cuts(module)))
        with _random_kept(), torch.no_grad(), _autocast_off(), mode:
            args, kwargs = copy.deepcopy((args, dict(kwargs)))  # the mode makes tensors into meta ones
            return self.module(*args, **kwargs)

    def _clone(self, module: nn.Module) -> nn.Module:
        if id(module) in self._copies:
            return self._copies[id(module)]
        if self._context is None and isinstance(module, ParallelModule):
            clone = _dense(module)
        else:
            clone = module.__class__.__new__(module.__class__)
            self._copies[id(module)] = clone
            self._fill(clone, module)
        self._copies[id(module)] = clone
        return clone

    def _fill(self, clone: nn.Module, module: nn.Module) -> None:
        state = vars(clone)
        state.update(vars(module))
        state.pop("forward", None)  # one that was put on the object is bound to the original
        state["_compiled_call_impl"] = None
        for name in _HOOKS:
            state[name] = collections.OrderedDict()
        for name, value in vars(module).items():
            if type(value) in _CONTAINERS and name not in ("_modules", "_parameters", "_buffers", *_HOOKS):
                state[name] = copy.copy(value)  # what a forward appends must not reach the real one
        state["_modules"] = {name: child and self._clone(child) for name, child in module._modules.items()}
        state["_buffers"] = {name: _empty(tensor) for name, tensor in module._buffers.items()}
        state["_parameters"] = {name: _empty(tensor) for name, tensor in module._parameters.items()}
        if isinstance(clone, ParallelModule):
            self._place(clone)

    def _place(self, clone: ParallelModule) -> None:
        context = self._context
        clone.context = context
        for name in clone.dense_shapes:
            shape = clone.local_shape(name, context.degree, context.slot)
            clone._parameters[name] = nn.Parameter(torch.empty(shape))
        entry = getattr(clone, "_entry", None)
        if entry is not None:
            clone._entry = self._entries.setdefault(id(entry), BlockInput())
        clone.relocate()

    def _localize(self, local_heads: Sequence[LocalHeads]) -> None:
        for heads in local_heads:
            clone = self._copies.get(id(heads.module))
            if clone is None:
                continue
            moved = replace(heads, module=clone)
            if self._context is None:
                moved.restore()
            else:
                moved.relocate(self._context)


def _dense(module: ParallelModule) -> nn.Module:
    if isinstance(module, VocabParallelEmbedding):
        dense: nn.Module = nn.Embedding(module.num_embeddings, module.embedding_dim)
    else:
        dense = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
    return dense.train(module.training)


def _cuts(module: ColumnParallelLinear) -> Cuts:
    context = module.context
    widths = (segment.local_extent(context.degree, context.slot) for segment in module.layout.segments)
    return Cuts(module.layout.segments[0].sizes[0], tuple(widths))


def _follower(mode: MetaMode, cuts: Cuts):
    return lambda _, args, output: mode.follow(output, cuts)


def _empty(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    empty = torch.empty(tensor.shape, dtype=dtype, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


@contextlib.contextmanager
def _random_kept() -> Iterator[None]:
    python = random.getstate()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)


@contextlib.contextmanager
def _autocast_off() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield
