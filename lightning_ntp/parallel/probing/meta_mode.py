"""A mode in which torch computes shapes only, and which watches how local features are split into heads."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_VIEWS = (Tensor.view, Tensor.reshape, torch.reshape, Tensor.unflatten, torch.unflatten)
_STAY = (Tensor.cuda, Tensor.cpu)
_TO_FLOAT = (Tensor.half, Tensor.bfloat16, Tensor.double)
_PRODUCTS = ("linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "einsum")  # their last dimension is another one
_META = torch.device("meta")
_OWN_CODE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH_CODE = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


class HardCodedShape(Exception):
    """Local features were cut at another place than between heads."""


@dataclass(frozen=True)
class Cuts:
    """Where the local features of a column-parallel layer may be cut.

    Attributes:
        head: Features of one head.
        segments: Local features of each segment of a fused projection.
    """

    head: int
    segments: tuple[int, ...]

    def check(self, source: Tensor, result: Tensor) -> None:
        """Refuse a reshape that splits the last dimension of ``source`` through heads.

        Raises:
            HardCodedShape: if it does.
        """
        width, size, pieces = source.shape[-1], 1, []
        for extent in reversed(result.shape):
            size *= extent
            pieces.append(size)
            if size >= width:
                break
        is_split = width > 0 and size == width and len(pieces) > 1
        if is_split and self.head not in pieces and not any(s in pieces for s in self.segments if s < width):
            raise HardCodedShape(
                f"{width} local features were reshaped to {tuple(result.shape)}, "
                f"which cuts through heads of {self.head}"
            )


class MetaMode(TorchFunctionMode):
    """Every tensor that an operation meets becomes a meta tensor, every floating one float32: autocast or a mixture of
    precisions must not matter for a shape.

    A ``view`` with a fixed number of heads and a free head size (``view(b, t, 8, -1)``) runs at every degree and is
    wrong at most. So the outputs of column-parallel layers of heads are followed through views and elementwise
    operations, and where their last dimension is split, a head must stay whole.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[Tensor] = []  # keeps them alive, so that ids are not used again
        self._cuts: dict[int, Cuts] = {}

    def follow(self, output: Tensor, cuts: Cuts) -> None:
        """Watch how the last dimension of ``output`` is split."""
        self._seen.append(output)
        self._cuts[id(output)] = cuts

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        args, kwargs = _to_meta(args), _to_meta(kwargs or {})
        if func is Tensor.__deepcopy__:
            return args[0]
        if func in _STAY:
            return args[0]
        result = args[0].float() if func in _TO_FLOAT else _as_float(func(*args, **kwargs))
        source = args[0] if args and isinstance(args[0], Tensor) else None
        cuts = self._cuts.get(id(source))
        if cuts is not None and getattr(func, "__name__", "") not in _PRODUCTS:
            if func in _VIEWS and isinstance(result, Tensor):
                cuts.check(source, result)
            for part in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(part, Tensor) and part.dim() == source.dim() and part.shape[:-1] == source.shape[:-1]:
                    self.follow(part, cuts)
        return result


def code_line(error: BaseException) -> str:
    """`` (file.py:12: the line)`` of the last frame that is the user's, or nothing."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_OWN_CODE, _TORCH_CODE)) and os.path.exists(frame.filename):
            return f" ({os.path.basename(frame.filename)}:{frame.lineno}: {frame.line})"
    return ""


def _to_meta(value: Any) -> Any:
    """Arguments of one operation, with meta tensors, the meta device and float32 instead of what was there."""
    if isinstance(value, Tensor):
        return _as_float(value if value.is_meta else torch.empty_like(value, device=_META))
    if isinstance(value, torch.device):
        return _META
    if isinstance(value, torch.dtype):
        return torch.float32 if value.is_floating_point else value
    if isinstance(value, str) and value.partition(":")[0] in ("cuda", "cpu"):
        return "meta"
    if type(value) in (tuple, list):
        return type(value)(_to_meta(part) for part in value)
    if type(value) is dict:
        return {key: _to_meta(part) for key, part in value.items()}
    return value


def _as_float(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float32:
        return torch.empty_like(value, dtype=torch.float32)
    return value
