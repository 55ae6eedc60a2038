"""Python objects and tensors of unknown shape over a control channel.

They travel as pickles between the members of one job, as torch's own object collectives do; never through the store.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ntp.comm.exchange import Exchange


def broadcast_object(exchange: Exchange, value: Any, source: int) -> Any:
    """The object of the member at group position ``source``, on all members; there the object itself.

    Args:
        exchange: A channel for CPU tensors.
        value: Anything that ``torch.save`` can write; only looked at on the source.
        source: Position in the group.
    """
    if exchange.size == 1:
        return value
    payload = _pack(value) if exchange.rank == source else _EMPTY
    size = exchange.all_reduce(torch.tensor([payload.numel()]), tag="object size")
    data = payload if exchange.rank == source else torch.empty(int(size), dtype=torch.uint8)
    exchange.broadcast(data, source, tag="object")
    return value if exchange.rank == source else _unpack(data)


def gather_tensors(exchange: Exchange, tensor: Tensor, sources: Sequence[int]) -> list[Tensor]:
    """The tensors of some members, on all members.

    Args:
        exchange: A channel for CPU tensors.
        tensor: Of any shape and dtype, which may differ between members.
        sources: Group positions of the members whose tensors are wanted.

    Returns:
        One tensor for each source, in that order, on the device of ``tensor``.
    """
    if exchange.size == 1:
        return [tensor]
    payload = _pack(tensor.detach().cpu()) if exchange.rank in sources else _EMPTY
    sizes = torch.zeros(exchange.size, dtype=torch.int64)
    sizes[exchange.rank] = payload.numel()
    rows = exchange.all_reduce(sizes, tag="tensor sizes").tolist()
    parts = exchange.all_gather_uneven(payload, rows, tag="tensors")
    return [_unpack(parts[source]).to(tensor.device) for source in sources]


_EMPTY = torch.empty(0, dtype=torch.uint8)


def _pack(value: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _unpack(data: Tensor) -> Any:
    return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=False)
