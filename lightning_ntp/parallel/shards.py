"""Cut a dense tensor into a slot's part, and put parts back together."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ntp.layout import ParameterLayout, Replicated, Sharded, merge_rows


def local_shape(shape: torch.Size, layout: ParameterLayout, degree: int, slot: int) -> torch.Size:
    """Shape of a slot's part of a dense tensor of ``shape``."""
    if isinstance(layout, Replicated):
        return shape
    return torch.Size(
        layout.local_extent(degree, slot) if dim == layout.dim else size for dim, size in enumerate(shape)
    )


def take_local(dense: Tensor, layout: ParameterLayout, degree: int, slot: int) -> Tensor:
    """A slot's part of a dense tensor, as a contiguous copy.

    Args:
        dense: The whole tensor; along ``layout.dim`` it has ``layout.extent`` rows.
    """
    if isinstance(layout, Replicated):
        return dense.clone(memory_format=torch.contiguous_format)
    local = dense.new_empty(local_shape(dense.shape, layout, degree, slot))
    for dense_row, local_row, rows in merge_rows(layout.pieces(degree, slot)):
        local.narrow(layout.dim, local_row, rows).copy_(dense.narrow(layout.dim, dense_row, rows))
    return local


def put_local(dense: Tensor, local: Tensor, layout: Sharded, degree: int, slot: int) -> None:
    """Write a slot's part into the dense tensor, in place."""
    for dense_row, local_row, rows in merge_rows(layout.pieces(degree, slot)):
        dense.narrow(layout.dim, dense_row, rows).copy_(local.narrow(layout.dim, local_row, rows))
