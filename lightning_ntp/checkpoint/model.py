"""The model's state under its dense names: out of the slots, and into them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_ntp.checkpoint.gather import Part, agree, cpu_copy, cut_local, device_of, gather_dense, leader_slot
from lightning_ntp.errors import CheckpointError
from lightning_ntp.layout import Sharded
from lightning_ntp.parallel import ParallelModel, ParallelParameter
from lightning_ntp.topology import Topology


def gather_model_state(model: ParallelModel, topology: Topology, rank: int) -> dict[str, Any]:
    """The ``state_dict`` that the dense model would have, in host memory, on the leader; ``{}`` elsewhere.

    Every member calls it, between steps and on the main thread; the leader's replica alone has traffic, one tensor at a
    time. Keys, their order and tied duplicates are those of ``model.module.state_dict()``, which is what a user's
    override or hook makes of them. Buffers and extra state are the leader's.

    Raises:
        CheckpointError: if an override or hook hides which parameter a sharded tensor belongs to, or the slots of the
            replica give different keys.
    """
    state = _state_dict(model.module)
    destination = leader_slot(topology, rank)
    parts, problems = _sharded_parts(model, state)
    if destination is None:
        if problems:
            raise CheckpointError("; ".join(problems))
        return {}
    agree(list(parts.values()), problems, model.context, device_of(model))
    dense: dict[int, Tensor | None] = {}  # by the tensor, so that a tied one travels once and stays tied in the file
    for key, value in list(state.items()):
        if not isinstance(value, Tensor):
            continue
        if id(value) not in dense:
            is_leader = model.context.slot == destination
            if key in parts:
                dense[id(value)] = gather_dense(parts[key], model.context, destination)
            else:
                dense[id(value)] = cpu_copy(value) if is_leader else None
        state[key] = dense[id(value)]
    return state if model.context.slot == destination else {}


def load_model_state(model: ParallelModel, dense_state: Mapping[str, Any], strict: bool = True) -> None:
    """Copy this slot's part of a dense ``state_dict`` into the model, in place: parameters keep their identity.

    Goes through ``model.module.load_state_dict``, with sharded entries cut to the slot, so overrides, hooks, buffers
    and extra state work as in the dense model. What is lost: a hook or override that renames a sharded parameter on
    loading is not followed, so its entry is not cut and is refused for its shape.

    Args:
        model: This member's part of the model.
        dense_state: The same on every member.
        strict: Refuse missing and unexpected keys.

    Raises:
        CheckpointError: listing every missing and unexpected key (if strict) and every wrong shape. Wrong shapes are
            found before anything is changed.
    """
    named = _names(model)
    _check_shapes(model, dense_state, named, strict)
    local = copy.copy(dense_state)  # keeps the modules' versions, which an OrderedDict carries beside its items
    for key in named.keys() & dense_state.keys():
        local[key] = cut_local(dense_state[key], named[key].layout, model.context)
    try:
        model.module.load_state_dict(local, strict=strict)
    except RuntimeError as error:
        raise CheckpointError(
            f"the saved model state does not fit: {error}\nUse a file of this model, or load with strict=False "
            "(strict_loading=False on a LightningModule) to accept missing and unexpected keys"
        ) from error


def _names(model: ParallelModel) -> dict[str, ParallelParameter]:
    """Parameters by every name they have: a tied one has several."""
    known = {id(parameter.parameter): parameter for parameter in model.parameters()}
    return {name: known[id(tensor)] for name, tensor in model.module.named_parameters(remove_duplicate=False)}


def _state_dict(module: nn.Module) -> dict[str, Any]:
    """``module.state_dict()`` with the parameters themselves, unless an override does not take ``keep_vars``."""
    arguments = inspect.signature(module.state_dict).parameters.values()
    keeps = any(each.name == "keep_vars" or each.kind is each.VAR_KEYWORD for each in arguments)
    return module.state_dict(keep_vars=True) if keeps else module.state_dict()


def _sharded_parts(model: ParallelModel, state: Mapping[str, Any]) -> tuple[dict[str, Part], list[str]]:
    """The entries that are parts of dense tensors, known by identity or else by name; and what cannot be told."""
    parts, problems = {}, []
    by_name, known = _names(model), {id(each.parameter): each for each in model.parameters()}
    sharded = [each for each in known.values() if isinstance(each.layout, Sharded)]
    owner = {each.parameter.untyped_storage().data_ptr(): each.name for each in sharded if each.parameter.numel()}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            continue
        found = known.get(id(value), by_name.get(key))
        if found is None:
            source = owner.get(value.untyped_storage().data_ptr()) if value.numel() else None
            if source is not None:
                problems.append(
                    f"state_dict() gives a part of {source!r} under the name {key!r}, which no parameter has: let the "
                    "override take keep_vars and pass it on, or keep the parameters' names"
                )
        elif isinstance(found.layout, Sharded):
            if value.shape == found.parameter.shape:
                parts[key] = Part.of(key, value, found)
            else:
                problems.append(
                    f"state_dict() gives {key!r} the shape {tuple(value.shape)}, but this slot's part of it has "
                    f"{tuple(found.parameter.shape)}: leave sharded parameters as they are in hooks and overrides"
                )
    return parts, problems


def _check_shapes(
    model: ParallelModel, dense_state: Mapping[str, Any], named: Mapping[str, ParallelParameter], strict: bool
) -> None:
    """Refuse a sharded entry that is not the whole tensor: one of a part's size would be loaded without a word."""
    wrong = {
        key: f"{key} is {_shape(dense_state[key])} in the file, {tuple(parameter.dense_shape)} in the model"
        for key, parameter in named.items()
        if key in dense_state and _shape(dense_state[key]) != tuple(parameter.dense_shape)
    }
    if not any(isinstance(named[key].layout, Sharded) for key in wrong):
        return  # replicated ones are left to torch: a hook may reshape them on loading
    keys = model.module.state_dict().keys() if strict else dense_state.keys()
    missing, unexpected = sorted(keys - dense_state.keys()), sorted(dense_state.keys() - keys)
    raise CheckpointError(
        f"the saved model state does not fit: wrong shapes: {'; '.join(wrong.values())}"
        f"{f'; missing keys: {missing}' if missing else ''}{f'; unexpected keys: {unexpected}' if unexpected else ''}. "
        "Use a file of this model (the layout does not matter: files hold whole tensors)"
    )


def _shape(value: Any) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
