"""Whether an optimizer works on a slot's part of a tensor as it does on the whole: tried out on a few elements.

A slot holds some rows or columns of a matrix. An optimizer whose update of an element depends on others (a norm, a
factored moment, an orthogonalisation) would be silently wrong there, and so would one that draws random numbers.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ntp.errors import UnsupportedError

log = logging.getLogger(__name__)

_SHAPE = (6, 5, 2, 2, 2, 2)
_STEPS = 3
_LEARNING_RATE = 1e-2
_TOLERANCE = 1e-3  # of the largest change; an elementwise rule is off by rounding, any other by much more


def check_elementwise(optimizer: Optimizer) -> None:
    """Take some steps of a new optimizer of this class on a small tensor, and on the parts of that tensor.

    An optimizer that cannot be built anew from its own options, or takes no step on such tensors, is let pass: its
    states are looked at again before they move.

    Raises:
        UnsupportedError: if the parts come out otherwise than the whole, or a state is neither of the parameter's shape
            nor a scalar.
    """
    done = set()
    for group in optimizer.param_groups:
        options = _options(optimizer, group)
        for dims, device in dict.fromkeys((parameter.dim(), parameter.device) for parameter in group["params"]):
            kind = (str(options), dims, device)
            if kind not in done and 0 < dims <= len(_SHAPE) and device.type != "meta":
                done.add(kind)
                _check(optimizer, options, dims, device)


def _check(optimizer: Optimizer, options: Mapping[str, Any], dims: int, device: torch.device) -> None:
    start = torch.linspace(-1, 1, torch.Size(_SHAPE[:dims]).numel()).view(_SHAPE[:dims])
    name = f"optimizer {type(optimizer).__name__}"
    try:
        whole, states = _train(type(optimizer), options, start, device, dim=None)
        parts = [_train(type(optimizer), options, start, device, dim)[0] for dim in range(min(dims, 2))]
    except Exception as error:
        log.debug("%s cannot be tried out on a tensor of %d dimensions: %s", name, dims, error)
        return
    for key, state in states:
        if isinstance(state, Tensor) and state.numel() != 1 and state.shape != start.shape:
            raise UnsupportedError(
                f"{name} keeps {key!r} of shape {tuple(state.shape)} for a parameter of shape {tuple(start.shape)}: "
                "only states of the parameter's shape and scalars can move between slots; use AdamW, Adam or SGD"
            )
    largest = (whole - start).abs().max()
    if any(not (part - whole).abs().max() <= _TOLERANCE * largest for part in parts):
        raise UnsupportedError(
            f"{name} changes a part of a tensor otherwise than the whole: its update of one element depends on others, "
            "or on chance, so on a slot's part it would be silently wrong; use AdamW, Adam or SGD"
        )


def _options(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """What to build an optimizer like this one from; the learning rate may be 0 at the moment."""
    signature = inspect.signature(type(optimizer)).parameters.values()
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature)
    names = {each.name for each in signature}
    options = {key: group[key] for key in optimizer.defaults if key in group and (takes_all or key in names)}
    if options.get("lr") is not None:
        options["lr"] = _LEARNING_RATE
    return options


def _train(
    kind: type[Optimizer], options: Mapping[str, Any], start: Tensor, device: torch.device, dim: int | None
) -> tuple[Tensor, list[tuple[Any, Any]]]:
    """The tensor after some steps, and the last optimizer's states; cut in two along ``dim``, each with its own."""
    done, states = [], []
    for number, part in enumerate([start] if dim is None else _cut(start, dim)):
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            parameter = nn.Parameter(part.clone().to(device))
            optimizer = kind([parameter], **copy.deepcopy(dict(options)))
            closure = [lambda: torch.zeros(())] if "closure" in inspect.signature(optimizer.step).parameters else []
            for step in range(_STEPS):
                whole = torch.cos(torch.arange(start.numel()) * (step + 1.7)).view(start.shape)
                grad = whole if dim is None else _cut(whole, dim)[number]
                parameter.grad = grad.clone().to(device)
                optimizer.step(*closure)
            done.append(parameter.detach().cpu())
            states = list(_flat(optimizer.state.get(parameter, {})))
    return done[0] if dim is None else torch.cat(done, dim), states


def _cut(tensor: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return tensor.narrow(dim, 0, 2), tensor.narrow(dim, 2, tensor.shape[dim] - 2)


def _flat(state: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """The states, and the tensors in lists of them."""
    for key, value in state.items():
        for item in value if isinstance(value, (list, tuple)) else [value]:
            yield key, item
