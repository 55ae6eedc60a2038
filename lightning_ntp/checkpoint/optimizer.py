"""An optimizer's state in torch's own form, with dense tensors: out of the slots, and into them.

Optimizers of elementwise rules have states of their parameter's shape (moments, momentum) and scalars (step counts).
The first lie on the slots as the parameter does, the second are equal on all. Anything else that belongs to a sharded
parameter (a factored moment, a preconditioner) has no dense form here and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import Optimizer

from lightning_ntp.checkpoint.gather import Part, agree, cpu_copy, device_of, gather_dense, leader_slot
from lightning_ntp.errors import CheckpointError
from lightning_ntp.layout import Sharded
from lightning_ntp.parallel import ParallelModel, ParallelParameter
from lightning_ntp.parallel.shards import take_local
from lightning_ntp.topology import Topology

_Entry = tuple[Any, str]  # index of a parameter, key of its state


def gather_optimizer_state(model: ParallelModel, optimizer: Optimizer, topology: Topology, rank: int) -> dict[str, Any]:
    """``optimizer.state_dict()`` as a dense run has it, in host memory, on the leader; ``{}`` elsewhere.

    Every member calls it, between steps and on the main thread; the leader's replica alone has traffic, one tensor at a
    time. State that was never made stays absent. State that is not keyed by a parameter is the leader's.

    Raises:
        CheckpointError: if a sharded parameter has a state that is neither of its shape nor a scalar, or the slots of
            the replica hold different states.
    """
    packed = optimizer.state_dict()
    destination = leader_slot(topology, rank)
    parts, problems = _sharded_parts(optimizer, packed, _sharded(model, optimizer, packed))
    if destination is None:
        if problems:
            raise CheckpointError("; ".join(problems))
        return {}
    agree(list(parts.values()), problems, model.context, device_of(model))
    dense = {entry: gather_dense(part, model.context, destination) for entry, part in parts.items()}
    if model.context.slot != destination:
        return {}
    state = {
        index: {key: dense[index, key] if (index, key) in dense else _to_cpu(value) for key, value in values.items()}
        if isinstance(values, Mapping)
        else _to_cpu(values)
        for index, values in packed["state"].items()
    }
    rest = {key: _to_cpu(value) for key, value in packed.items() if key != "state"}
    return {"state": state, **rest}


def load_optimizer_state(model: ParallelModel, optimizer: Optimizer, dense_state: Mapping[str, Any]) -> None:
    """Load a dense ``state_dict`` into the optimizer of this slot, with what ``optimizer.load_state_dict`` does to it.

    Args:
        model: This member's part of the model.
        optimizer: Over its parameters, in the order of the dense run's optimizer.
        dense_state: The same on every member.

    Raises:
        CheckpointError: if the parameter groups differ in number or size, a state belongs to no parameter, or a state
            of a sharded parameter is neither of the dense shape nor a scalar. Nothing has been changed then.
    """
    _check_groups(optimizer, dense_state)
    sharded, problems = _sharded(model, optimizer, dense_state), []
    indices = {index for group in dense_state["param_groups"] for index in group["params"]}
    unknown = [index for index in dense_state["state"] if isinstance(index, int) and index not in indices]
    if unknown:
        problems.append(f"the file has states for parameters {unknown}, which are in none of its parameter groups")
    state: dict[Any, Any] = {}
    for index, values in dense_state["state"].items():
        if index not in sharded:
            state[index] = _to_cpu(values)  # a copy: torch may keep what it is given, and a mapped file must not change
            continue
        parameter, state[index] = sharded[index], {}
        for key, value in values.items():
            kind = _kind(value, parameter.dense_shape)
            if kind == "other":
                problems.append(_misfit(optimizer, key, value, parameter, parameter.dense_shape))
            elif kind == "like":
                context = model.context
                state[index][key] = take_local(value, parameter.layout, context.degree, context.slot)
            else:
                state[index][key] = _to_cpu(value)
    if problems:
        raise CheckpointError("; ".join(problems))
    optimizer.load_state_dict({**dense_state, "state": state})


def _sharded(model: ParallelModel, optimizer: Optimizer, packed: Mapping[str, Any]) -> dict[Any, ParallelParameter]:
    """Sharded parameters by the index that ``packed`` has for them."""
    known = {id(each.parameter): each for each in model.parameters() if isinstance(each.layout, Sharded)}
    return {index: known[id(tensor)] for index, tensor in _indices(optimizer, packed) if id(tensor) in known}


def _indices(optimizer: Optimizer, packed: Mapping[str, Any]) -> Iterator[tuple[Any, Tensor]]:
    for group, saved in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        yield from zip(saved["params"], group["params"], strict=True)


def _sharded_parts(
    optimizer: Optimizer, packed: Mapping[str, Any], sharded: Mapping[Any, ParallelParameter]
) -> tuple[dict[_Entry, Part], list[str]]:
    parts, problems = {}, []
    for index, parameter in sharded.items():
        for key, value in packed["state"].get(index, {}).items():
            kind = _kind(value, parameter.parameter.shape)
            if kind == "like":
                parts[index, key] = Part.of(f"{key} of {parameter.name}", value, parameter)
            elif kind == "other":
                problems.append(_misfit(optimizer, key, value, parameter, parameter.parameter.shape))
    return parts, problems


def _kind(value: Any, shape: torch.Size) -> str:
    """``"like"`` the parameter, ``"scalar"``, or ``"other"``, of which nobody knows how it lies on the slots."""
    if isinstance(value, Tensor):
        return "like" if value.shape == shape else "scalar" if value.numel() == 1 else "other"
    nested: list[Tensor] = []
    apply_to_collection(value, Tensor, nested.append)
    return "scalar" if all(tensor.numel() == 1 for tensor in nested) else "other"


def _misfit(optimizer: Optimizer, key: str, value: Any, parameter: ParallelParameter, shape: torch.Size) -> str:
    found = tuple(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__} of tensors"
    return (
        f"{type(optimizer).__name__} has the state {key!r} of shape {found} for the sharded parameter "
        f"{parameter.name!r}, whose shape there is {tuple(shape)}: only states of the parameter's shape and scalars "
        "fit another layout; use an elementwise optimizer (AdamW, SGD), or replicate that parameter in the plan"
    )


def _check_groups(optimizer: Optimizer, dense_state: Mapping[str, Any]) -> None:
    if not {"state", "param_groups"} <= dense_state.keys():
        raise CheckpointError(f"the saved state of {type(optimizer).__name__} has no 'state' and 'param_groups'")
    saved = [len(group["params"]) for group in dense_state["param_groups"]]
    present = [len(group["params"]) for group in optimizer.param_groups]
    if saved != present:
        raise CheckpointError(
            f"the saved optimizer has parameter groups of {saved} parameters, {type(optimizer).__name__} has {present}"
            ": build the optimizer as in the run that saved, or load the weights alone"
        )


def _to_cpu(value: Any) -> Any:
    return apply_to_collection(value, Tensor, cpu_copy)
