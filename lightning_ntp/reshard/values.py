"""Options and scalars of optimizers as plain JSON, exact to the last bit."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from lightning_ntp.errors import MembershipError, UnsupportedError

OPAQUE = "opaque"


def encode(value: Any, what: str) -> Any:
    """A value as plain JSON: floats in hexadecimal, one-element tensors with their dtype.

    Anything that is no number, text, tensor or collection of such is told by its type alone: it is ``OPAQUE``.

    Args:
        value: The value.
        what: What it is, for the message.

    Raises:
        UnsupportedError: for a tensor of several elements.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return {"float": float(value).hex()}
    if isinstance(value, Tensor):
        return {"tensor": _encode_tensor(value, what)}
    if type(value) in (list, tuple):
        return {type(value).__name__: [encode(item, what) for item in value]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(item, what) for key, item in value.items()}}
    return {OPAQUE: name_of(type(value))}


def decode(data: Any, own: Any, device: torch.device, what: str) -> Any:
    """Read ``encode``; nothing is changed in place.

    Args:
        data: The encoded value.
        own: This member's value, which stands in for an opaque one of the same type.
        device: Where tensors go that are not on the host.
        what: What it is, for the messages.

    Raises:
        UnsupportedError: if an opaque value has another type here.
        MembershipError: if ``data`` is no encoded value.
    """
    if not isinstance(data, dict):
        return data
    try:
        ((kind, content),) = data.items()
        if kind == "float":
            return float.fromhex(content)
        if kind == "tensor":
            return _decode_tensor(content, device, what)
        if kind in ("list", "tuple"):
            owns = own if type(own).__name__ == kind and len(own) == len(content) else [None] * len(content)
            items = [decode(item, mine, device, what) for item, mine in zip(content, owns, strict=True)]
            return items if kind == "list" else tuple(items)
        if kind == "dict":
            owns = own if isinstance(own, dict) else {}
            return {key: decode(item, owns.get(key), device, what) for key, item in content.items()}
        if kind == OPAQUE:
            return _keep_own(own, content, what)
    except (ValueError, TypeError, AttributeError) as error:
        if isinstance(error, UnsupportedError):
            raise
    raise MembershipError(f"{what} cannot be read: {str(data)[:80]!r}")


def is_opaque(data: Any) -> bool:
    """Whether an encoded value has an opaque part."""
    if not isinstance(data, dict):
        return False
    ((kind, content),) = data.items()
    if kind in ("list", "tuple", "dict"):
        return any(map(is_opaque, content.values() if kind == "dict" else content))
    return kind == OPAQUE


def name_of(kind: type) -> str:
    """A type's full name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def name_of_dtype(dtype: torch.dtype) -> str:
    """As ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: Any, what: str) -> torch.dtype:
    """Read ``name_of_dtype``.

    Raises:
        MembershipError: if this torch has no such dtype.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise MembershipError(f"{what} has the dtype {name!r}, which torch {torch.__version__} does not know")
    return dtype


def _encode_tensor(tensor: Tensor, what: str) -> list[Any]:
    if tensor.numel() != 1 or tensor.is_complex() or tensor.layout != torch.strided:
        raise UnsupportedError(
            f"{what} is a tensor of shape {tuple(tensor.shape)}, dtype {tensor.dtype}: a joiner gets options and "
            "scalars as single real numbers; use a number, or fault_tolerance=False"
        )
    return [name_of_dtype(tensor.dtype), list(tensor.shape), device_class(tensor), encode(tensor.item(), what)]


def _decode_tensor(content: Any, device: torch.device, what: str) -> Tensor:
    dtype, shape, where, number = content
    value = decode(number, None, device, what)
    return torch.full(shape, value, dtype=dtype_named(dtype, what), device=on_device(where, device))


def device_class(tensor: Tensor) -> str:
    """``"host"``, or ``"device"`` for whatever the parameters are on."""
    return "host" if tensor.device.type == "cpu" else "device"


def on_device(where: str, device: torch.device) -> torch.device:
    """Read ``device_class``, where the parameters are on ``device``."""
    return torch.device("cpu") if where == "host" else device


def _keep_own(own: Any, kind: str, what: str) -> Any:
    if name_of(type(own)) != kind:
        raise UnsupportedError(
            f"{what} is a {kind} at the other members and a {name_of(type(own))} here, and cannot be handed over: "
            "build the optimizer as they did"
        )
    return own
