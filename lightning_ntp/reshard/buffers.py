"""Buffers of modules (running statistics, masks) for members that have just joined.

Buffers are whole on every slot. Slots of one replica must have equal ones, or their activations differ, so a joiner
gets those of its own replica, if a member of it is there. Members that hold their parameters keep their buffers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ntp.comm.exchange import Exchange
from lightning_ntp.errors import MembershipError
from lightning_ntp.parallel.module import ParallelModule
from lightning_ntp.reshard.place import PeerState
from lightning_ntp.reshard.rows import from_bytes, no_bytes, to_bytes
from lightning_ntp.reshard.values import dtype_named, name_of_dtype


def move_buffers(
    module: nn.Module, exchange: Exchange, peers: Sequence[PeerState], device: torch.device
) -> tuple[int, int]:
    """Give joiners the buffers of their replica, or else of the first member that has any. All members must call it.

    Comes before the first parameter moves: who holds that one has its buffers too.

    Args:
        module: The model; buffers that follow the slot stay as they are.
        exchange: All members of the move.
        peers: State of each of them, in group order.
        device: Where bytes travel.

    Returns:
        Bytes sent and bytes received.

    Raises:
        MembershipError: if this member's model has no place for a buffer.
    """
    sources = {rank: source for rank in range(len(peers)) if (source := _source(rank, peers)) is not None}
    if not sources:
        return 0, 0
    me = exchange.rank
    targets = [rank for rank, source in sources.items() if source == me]
    payload = _pack(module, device) if targets else no_bytes(device)
    size = to_bytes(torch.tensor([payload.numel()]), device)
    told = _hand_out(exchange, size, targets, sources.get(me), size.numel())
    expected = int(from_bytes(told, torch.int64, [1])) if told.numel() else 0
    data = _hand_out(exchange, payload, targets, sources.get(me), expected)
    if me in sources:
        _unpack(module, data)
    return payload.numel() * len(targets), data.numel()


def _source(rank: int, peers: Sequence[PeerState]) -> int | None:
    """Who gives a member its buffers; ``None`` if it has them or leaves."""
    peer = peers[rank]
    if peer.target is None or peer.holdings(0):
        return None
    having = [other for other, state in enumerate(peers) if state.holdings(0)]
    return min(having, key=lambda other: (peers[other].replica != peer.replica, other), default=None)


def _hand_out(exchange: Exchange, data: Tensor, targets: list[int], source: int | None, expected: int) -> Tensor:
    sent = [data.numel() if rank in targets else 0 for rank in range(exchange.size)]
    received = [expected if rank == source else 0 for rank in range(exchange.size)]
    return exchange.all_to_all(data.repeat(len(targets)), sent, received, tag="buffers")


def _pack(module: nn.Module, device: torch.device) -> Tensor:
    """Length of the header, header, and the buffers one after the other, as bytes."""
    persistent = module.state_dict(keep_vars=True).keys()
    found = [(f"{prefix}.{name}" if prefix else name, buffer) for prefix, _, name, buffer in _buffers(module)]
    header = [[path, name_of_dtype(b.dtype), list(b.shape), path in persistent] for path, b in found]
    text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    parts = [to_bytes(torch.tensor([text.numel()]), device), text.to(device)]
    return torch.cat([*parts, *(to_bytes(buffer, device) for _, buffer in found)])


def _unpack(module: nn.Module, data: Tensor) -> None:
    length = int(from_bytes(data[:8], torch.int64, [1]))
    header, data = json.loads(bytes(data[8 : 8 + length].tolist())), data[8 + length :]
    for path, dtype_name, shape, is_persistent in header:
        dtype = dtype_named(dtype_name, f"buffer {path!r}")
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        _write(module, path, from_bytes(data[:nbytes], dtype, shape), is_persistent)
        data = data[nbytes:]


def _buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """(name of the owner, owner, own name, buffer) of all buffers that do not follow the slot."""
    for prefix, owner in module.named_modules():
        if not isinstance(owner, ParallelModule):
            for name, buffer in owner.named_buffers(recurse=False):
                yield prefix, owner, name, buffer


def _write(module: nn.Module, path: str, value: Tensor, is_persistent: bool) -> None:
    prefix, _, name = path.rpartition(".")
    try:
        owner = module.get_submodule(prefix)
        there: Any = dict(owner.named_buffers(recurse=False)).get(name)
        if there is None:
            owner.register_buffer(name, value, persistent=is_persistent)  # the others made it when it was first needed
            return
    except (AttributeError, KeyError) as error:
        raise MembershipError(
            f"the other members have a buffer {path!r}, for which there is no place here ({error}): a joiner must "
            "build the model that they have"
        ) from None
    if there.shape == value.shape and there.dtype == value.dtype and there.is_contiguous():
        there.data.copy_(value)
    else:
        setattr(owner, name, value.to(there.device))
