"""Rows of local tensors, and the bytes in which they travel."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from lightning_ntp.layout import ParameterLayout, Replicated, Sharded
from lightning_ntp.parallel.model import ParallelParameter
from lightning_ntp.reshard.place import Place


def rows_of(tensor: Tensor, layout: ParameterLayout) -> Tensor:
    """A view with the sharded dimension first; a replicated tensor is one row."""
    if isinstance(layout, Replicated):
        return tensor.reshape(1, tensor.numel())
    return tensor.movedim(layout.dim, 0)


def row_numel(param: ParallelParameter) -> int:
    """Elements of one row."""
    rows = 1 if isinstance(param.layout, Replicated) else param.layout.extent
    return param.dense_numel // rows


def to_bytes(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor's elements as one row of bytes on ``device``."""
    return tensor.detach().to(device).contiguous().flatten().view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype, shape: torch.Size | list[int]) -> Tensor:
    """Read ``to_bytes``, into memory of its own: the bytes may be unaligned."""
    return data.clone().view(dtype).view(shape)


def no_bytes(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device)


@lru_cache(maxsize=4096)
def is_same_part(layout: ParameterLayout, one: Place, other: Place) -> bool:
    """Whether the local tensors at two places are equal, row by row."""
    if isinstance(layout, Replicated):
        return True
    return layout.pieces(one.degree, one.slot) == layout.pieces(other.degree, other.slot)


@lru_cache(maxsize=4096)
def covers(layout: Sharded, new: Place, old: Place) -> bool:
    """Whether the part at ``new`` contains that at ``old``."""
    units = {(piece.segment, piece.unit) for piece in layout.pieces(new.degree, new.slot)}
    return all((piece.segment, piece.unit) in units for piece in layout.pieces(old.degree, old.slot))
