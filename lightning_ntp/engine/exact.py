"""Whether an optimizer gives a part of a tensor bitwise what it gives the whole: tried out.

Replicas of unequal degrees hold equal units in tensors of other shapes. A kernel that works on a tensor's last elements
otherwise than on the rest, such as with another rounding, makes equal units differ in their last bits. On CPU that was
measured for ``AdamW(fused=True)`` in 32 and 64 bits and for ``SGD`` in bfloat16, not for the other optimizers of torch.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ntp.errors import UnsupportedError

log = logging.getLogger(__name__)

_NUMEL, _STEPS = 509, 12
_LENGTHS = (7, 61)  # of the parts: shorter than a vector register, and some registers with a rest


def refuse_inexact(optimizers: Sequence[Optimizer], argument: str) -> None:
    """Refuse optimizers whose updates depend on the shape, in any bit.

    One that cannot be built anew from its own options is let pass.

    Args:
        optimizers: Those of the model.
        argument: What asks for equal bits, for the message.

    Raises:
        UnsupportedError: names the optimizer.
    """
    done = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            options = _options(optimizer, group)
            for dtype, device in dict.fromkeys((each.dtype, each.device) for each in group["params"]):
                kind = type(optimizer), str(options), dtype, device
                if kind in done or device.type == "meta":
                    continue
                done.add(kind)
                if _is_fused_on_cpu(group, device) or not _is_exact(type(optimizer), options, dtype, device):
                    raise UnsupportedError(_refusal(optimizer, group, dtype, device, argument))


def _is_fused_on_cpu(group: Mapping[str, Any], device: torch.device) -> bool:
    return bool(group.get("fused")) and device.type == "cpu"


def _refusal(
    optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype, device: torch.device, argument: str
) -> str:
    fused = ", fused=True" if group.get("fused") else ""
    name = f"{type(optimizer).__name__}({dtype} on {device.type}{fused})"
    way_out = "use fused=False" if fused else "keep the weights in float32, or use AdamW"
    return (
        f"{argument} compares the bits of weights of replicas with unequal degrees, but the update of {name} depends "
        f"on a tensor's shape in its last bits, so healthy members would be suspected: {way_out}, or leave {argument} "
        "out"
    )


def _options(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """What to build an optimizer like this one from; the learning rate may be 0 at the moment."""
    names = inspect.signature(type(optimizer)).parameters
    options = {key: group[key] for key in optimizer.defaults if key in group and key in names}
    if options.get("lr") is not None:
        options["lr"] = 1e-3
    return options


def _is_exact(kind: type[Optimizer], options: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> bool:
    try:
        whole = _train(kind, options, dtype, device, _NUMEL)
        return all(torch.equal(whole, _train(kind, options, dtype, device, length)) for length in _LENGTHS)
    except Exception as error:
        log.debug("%s cannot be tried out in %s: %s", kind.__name__, dtype, error)
        return True


def _train(
    kind: type[Optimizer], options: Mapping[str, Any], dtype: torch.dtype, device: torch.device, length: int
) -> Tensor:
    """Weights after some steps on parts of ``length`` elements."""
    numbers = torch.arange(_NUMEL, dtype=torch.float64)
    parameters = [nn.Parameter(part.clone()) for part in torch.cos(numbers * 1.7).to(device, dtype).split(length)]
    optimizer = kind(parameters, **copy.deepcopy(dict(options)))
    for step in range(_STEPS):
        grads = (torch.cos(numbers * (step + 2.3)) * 10 ** torch.sin(numbers)).to(device, dtype).split(length)
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
    return torch.cat([parameter.detach() for parameter in parameters])
