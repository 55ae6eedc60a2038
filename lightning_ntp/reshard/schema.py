"""What a member's model and optimizers look like, without their tensors: what a joiner has to know to get those.

The schema has every scalar (step counts, learning rates), so two members whose schemas are equal differ in nothing but
the content of their tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ntp.errors import MembershipError, UnsupportedError
from lightning_ntp.membership.parse import Fields
from lightning_ntp.parallel.model import ParallelParameter
from lightning_ntp.reshard.states import OptimizerStates
from lightning_ntp.reshard.values import (
    decode,
    device_class,
    dtype_named,
    encode,
    is_opaque,
    name_of,
    name_of_dtype,
    on_device,
)

Params = Sequence[ParallelParameter]


def describe(params: Params, states: OptimizerStates) -> dict[str, Any]:
    """The schema of this member.

    Raises:
        UnsupportedError: if an optimizer has a state or an option that no joiner can be given.
    """
    index = {param.parameter: at for at, param in enumerate(params)}
    return {
        "parameters": [
            [
                param.name,
                list(param.dense_shape),
                name_of_dtype(param.parameter.dtype),
                hashlib.sha256(repr(param.layout).encode()).hexdigest()[:12],
                param.parameter.requires_grad,
            ]
            for param in params
        ],
        "optimizers": [
            {
                "class": name_of(type(optimizer)),
                "groups": _groups(optimizer, number, index),
                "states": _runs(params, states, number),
                "others": _others(optimizer, index),
            }
            for number, optimizer in enumerate(states.optimizers)
        ],
    }


def digest_of(schema: Mapping[str, Any]) -> str:
    """A short text that is equal for equal schemas."""
    return hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).hexdigest()


def check_alike(digests: Mapping[Any, str]) -> None:
    """Check that members have equal schemas: the same model, options and scalars. All come to the same result.

    Args:
        digests: ``digest_of`` each member's schema, by seat; the lowest is the one that others are compared to.

    Raises:
        MembershipError: names the seats that differ.
    """
    first = min(digests, default=None)
    others = sorted(seat for seat, digest in digests.items() if digest != digests[first])
    if others:
        raise MembershipError(
            f"{', '.join(map(str, others))}: the optimizer's options or scalars differ from those of {first}, though "
            "all have taken the same steps; look for a learning rate or a step count that depends on the rank"
        )


def check_same(params: Params, states: OptimizerStates, schema: Any) -> None:
    """Check that this member's schema equals ``schema``.

    Raises:
        MembershipError: names the first difference.
    """
    read = _read(schema)
    _check_model(params, read["parameters"])
    for number, (optimizer, theirs) in enumerate(zip(states.optimizers, _optimizers(states, read), strict=True)):
        _check_optimizer(params, optimizer, number, theirs)
    difference = _difference(read, describe(params, states), "schema")
    if difference:
        raise MembershipError(f"this member differs from the one that it is compared to: {difference}")


def adopt(params: Params, states: OptimizerStates, schema: Any) -> None:
    """Make this member's optimizers look as ``schema`` says; tensors that are missing are there, but empty.

    Param groups are changed in place, since LR schedulers refer to them. State that the others have not is dropped.

    Raises:
        MembershipError: if the model or the optimizers are others; names the first difference. Nothing is changed then.
        UnsupportedError: if an option cannot be handed over.
    """
    read = _read(schema)
    _check_model(params, read["parameters"])
    device = params[0].parameter.device if params else torch.device("cpu")
    changes: list[Callable[[], None]] = []
    for number, (optimizer, theirs) in enumerate(zip(states.optimizers, _optimizers(states, read), strict=True)):
        _check_optimizer(params, optimizer, number, theirs)
        for at, (group, entry) in enumerate(zip(optimizer.param_groups, theirs["groups"], strict=True)):
            changes += _group_changes(group, entry["options"], device, _group_name(optimizer, number, at))
        changes += _state_changes(params, optimizer, theirs, _name(optimizer, number))
    for change in changes:
        change()
    for param, entry in zip(params, read["parameters"], strict=True):
        param.parameter.requires_grad_(entry[4])


# Describing


def _groups(optimizer: Optimizer, number: int, index: Mapping[Any, int]) -> list[dict[str, Any]]:
    entries = []
    for at, group in enumerate(optimizer.param_groups):
        name = _group_name(optimizer, number, at)
        strange = [parameter for parameter in group["params"] if parameter not in index]
        if strange:
            raise UnsupportedError(
                f"{name}: a parameter of shape {tuple(strange[0].shape)} is no part of the model; build the optimizer "
                "from the model's parameters after it was sharded"
            )
        options = {key: encode(value, f"{name}: {key!r}") for key, value in group.items() if key != "params"}
        entries.append({"params": [index[parameter] for parameter in group["params"]], "options": options})
    return entries


def _runs(params: Params, states: OptimizerStates, number: int) -> list[list[Any]]:
    """[count, {key: entry}] of parameters that follow each other and have equal entries."""
    runs: list[list[Any]] = []
    for param in params:
        entry = {}
        for key, value, moves in states.items(number, param):
            tensor = [name_of_dtype(value.dtype), device_class(value)] if moves else []
            entry[key] = tensor or [_scalar(states, number, param, key, value)]
        if runs and runs[-1][1] == entry:
            runs[-1][0] += 1
        else:
            runs.append([1, entry])
    return runs


def _scalar(states: OptimizerStates, number: int, param: ParallelParameter, key: str, value: Any) -> Any:
    what = f"{_name(states.optimizers[number], number)}, state {key!r} of {param.name!r}"
    return _known(encode(value, what), what)


def _others(optimizer: Optimizer, index: Mapping[Any, int]) -> dict[str, Any]:
    """State that belongs to no parameter."""
    what = f"state of optimizer {type(optimizer).__name__} that belongs to no parameter"
    others = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    if not all(isinstance(key, str) for key in others):
        raise UnsupportedError(f"{what} has keys that are no text: {list(others)[:3]}; use fault_tolerance=False")
    return {key: _known(encode(value, what), what) for key, value in others.items()}


def _known(encoded: Any, what: str) -> Any:
    if is_opaque(encoded):
        raise UnsupportedError(f"{what} is {encoded}, which cannot be handed to a joiner; use fault_tolerance=False")
    return encoded


def _name(optimizer: Optimizer, number: int) -> str:
    return f"optimizer {number} ({type(optimizer).__name__})"


def _group_name(optimizer: Optimizer, number: int, at: int) -> str:
    return f"{_name(optimizer, number)}, parameter group {at}"


# Comparing


def _read(schema: Any) -> dict[str, Any]:
    fields = Fields("schema", schema)
    read = {"parameters": fields.take("parameters", list), "optimizers": fields.take("optimizers", list)}
    fields.finish()
    for entry in read["parameters"]:
        if not isinstance(entry, list) or len(entry) != 5:
            raise MembershipError(f"schema: {str(entry)[:80]!r} is no parameter")
    optimizers = []
    for data in read["optimizers"]:
        one = Fields("schema of an optimizer", data)
        kinds = {"class": str, "groups": list, "states": list, "others": dict}
        optimizers.append({key: one.take(key, kind) for key, kind in kinds.items()})
        one.finish()
    return {**read, "optimizers": optimizers}


def _check_model(params: Params, entries: Sequence[Any]) -> None:
    own = describe(params, OptimizerStates(()))["parameters"]
    for at, (mine, theirs) in enumerate(zip_longest(own, entries)):
        if mine is None or theirs is None or mine[:3] != theirs[:3]:
            raise MembershipError(
                f"parameter {at} is {_shown(theirs)} at the other members and {_shown(mine)} here: a joiner must build "
                "the model that they have, with the same code and arguments"
            )
        if mine[3] != theirs[3]:
            raise MembershipError(
                f"parameter {at}, {mine[0]!r}, is sharded in another way than at the other members: a joiner needs "
                "their plan, tensor_parallel_size and min_tensor_parallel_size"
            )


def _shown(entry: Any) -> str:
    return "missing" if entry is None else f"{entry[0]!r} of shape {tuple(entry[1])} and dtype {entry[2]}"


def _optimizers(states: OptimizerStates, read: Mapping[str, Any]) -> list[dict[str, Any]]:
    theirs = read["optimizers"]
    if len(theirs) != len(states.optimizers):
        raise MembershipError(f"the other members have {len(theirs)} optimizers, this one {len(states.optimizers)}")
    return theirs


def _check_optimizer(params: Params, optimizer: Optimizer, number: int, theirs: Mapping[str, Any]) -> None:
    name = _name(optimizer, number)
    if theirs["class"] != name_of(type(optimizer)):
        raise MembershipError(f"{name} is a {theirs['class']} at the other members")
    groups, others = optimizer.param_groups, theirs["groups"]
    if len(groups) != len(others):
        raise MembershipError(f"{name} has {len(groups)} parameter groups, {len(others)} at the other members")
    index = {param.parameter: at for at, param in enumerate(params)}
    for at, (group, entry) in enumerate(zip(groups, others, strict=True)):
        mine = [index.get(parameter, -1) for parameter in group["params"]]
        for own, other in zip_longest(mine, entry["params"]):
            if own != other:
                ours, their = ("nothing" if each is None else params[each].name for each in (own, other))
                raise MembershipError(
                    f"{_group_name(optimizer, number, at)} has {ours} where the other members have {their}: build the "
                    "optimizer as they did"
                )


def _difference(theirs: Any, ours: Any, path: str) -> str:
    """The first place where two pieces of JSON differ, with both values; empty if they are equal."""
    if isinstance(theirs, dict) and isinstance(ours, dict) and theirs.keys() == ours.keys():
        pairs = [(theirs[key], ours[key], f"{path}.{key}") for key in theirs]
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        pairs = [(a, b, f"{path}[{at}]") for at, (a, b) in enumerate(zip(theirs, ours, strict=True))]
    else:
        return "" if theirs == ours else f"{path} is {str(theirs)[:80]} there and {str(ours)[:80]} here"
    return next(filter(None, (_difference(*pair) for pair in pairs)), "")


# Adopting


def _group_changes(
    group: dict[str, Any], options: Mapping[str, Any], device: torch.device, name: str
) -> list[Callable[[], None]]:
    extra = sorted(group.keys() - options.keys() - {"params"})
    if extra:
        raise MembershipError(f"{name} has the option {extra[0]!r}, which it has not at the other members")
    changes = []
    for key, data in options.items():
        what = f"{name}: {key!r}"
        own, value = group.get(key), decode(data, group.get(key), device, what)
        if key in group and isinstance(own, Tensor) != isinstance(value, Tensor):
            raise MembershipError(f"{what} is {own!r} here, {value!r} at the other members: give it in the same form")
        changes.append(lambda key=key, own=own, value=value: _set_option(group, key, own, value))
    return changes


def _set_option(group: dict[str, Any], key: str, own: Any, value: Any) -> None:
    if isinstance(own, Tensor) and own.dtype == value.dtype and own.shape == value.shape:
        own.detach().copy_(value)  # compiled or captured steps know the tensor
    else:
        group[key] = value


def _state_changes(
    params: Params, optimizer: Optimizer, theirs: Mapping[str, Any], name: str
) -> list[Callable[[], None]]:
    try:
        entries = [entry for count, entry in theirs["states"] for _ in range(int(count))]
        made = [_state(param, optimizer, entry, name) for param, entry in zip(params, entries, strict=True)]
    except (TypeError, ValueError) as error:
        raise MembershipError(f"{name}: the states of the other members cannot be read: {error}") from None
    device = params[0].parameter.device if params else torch.device("cpu")
    others = {key: decode(data, None, device, name) for key, data in theirs["others"].items()}
    return [lambda: _set_states(params, optimizer, made, others)]


def _state(
    param: ParallelParameter, optimizer: Optimizer, entry: Mapping[str, Any], name: str
) -> dict[str, Any]:
    own, parameter, state = optimizer.state.get(param.parameter, {}), param.parameter, {}
    for key, data in entry.items():
        what = f"{name}, state {key!r} of {param.name!r}"
        if len(data) == 1:
            state[key] = decode(data[0], None, parameter.device, what)
            continue
        dtype, device = dtype_named(data[0], what), on_device(data[1], parameter.device)
        there, wanted = own.get(key), (dtype, device, parameter.shape)
        fits = isinstance(there, Tensor) and (there.dtype, there.device, there.shape) == wanted
        # Empty: one element stands for all until the move brings the part.
        state[key] = there if fits else torch.zeros((), dtype=dtype, device=device).expand(parameter.shape)
    return state


def _set_states(
    params: Params, optimizer: Optimizer, made: Sequence[dict[str, Any]], others: Mapping[str, Any]
) -> None:
    for key in [key for key in optimizer.state if not isinstance(key, Tensor)]:
        del optimizer.state[key]
    optimizer.state.update(others)
    for param, state in zip(params, made, strict=True):
        optimizer.state.pop(param.parameter, None)
        if state:
            optimizer.state[param.parameter] = state
