"""Collectives on a channel, with a recorder.

The only place that calls collectives of the model's tensors. Tensors must be contiguous: gloo silently reduces only
part of a strided view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from lightning_ntp.comm.groups import GroupHandle


@dataclass(frozen=True)
class Record:
    """One collective as this member saw it.

    Attributes:
        channel: Name of the channel.
        operation: ``"all_reduce"``, ``"all_to_all"``, ``"all_gather"`` or ``"broadcast"``.
        tag: What it was for, such as a bucket's number; empty if nobody said.
        sent_bytes: Bytes handed to the collective (for an all-to-all: what leaves this member).
        received_bytes: Bytes that come out (for an all-to-all: what reaches this member).
    """

    channel: str
    operation: str
    tag: str
    sent_bytes: int
    received_bytes: int


@dataclass
class Recorder:
    """Collects records; off until ``enabled``."""

    enabled: bool = False
    records: list[Record] = field(default_factory=list)

    def add(self, channel: str, operation: str, tag: str, sent: Tensor, received: Tensor) -> None:
        if self.enabled:
            self.records.append(Record(channel, operation, tag, sent.nbytes, received.nbytes))


_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Exchange:
    """Collectives on one channel. In a group of one they are the identity and leave no record."""

    def __init__(self, handle: GroupHandle, recorder: Recorder | None = None) -> None:
        self.handle = handle
        self.recorder = Recorder() if recorder is None else recorder

    @property
    def rank(self) -> int:
        return self.handle.rank

    @property
    def size(self) -> int:
        return self.handle.size

    def all_reduce(self, tensor: Tensor, op: str = "sum", tag: str = "") -> Tensor:
        """Reduce ``tensor`` in place over the group. It must be contiguous."""
        assert tensor.is_contiguous(), "all_reduce on a strided view is silently wrong"
        if self.size > 1 and tensor.numel():
            self.recorder.add(self.handle.name, "all_reduce", tag, tensor, tensor)
            self.handle.run(lambda group: dist.all_reduce(tensor, op=_OPERATIONS[op], group=group, async_op=True))
        return tensor

    def all_to_all(self, send: Tensor, send_numels: Sequence[int], recv_numels: Sequence[int], tag: str = "") -> Tensor:
        """Exchange flat pieces of unequal length; sizes may be 0.

        Args:
            send: 1-D, the pieces for slot 0, 1, ... one after the other.
            send_numels: Elements for each slot.
            recv_numels: Elements from each slot.

        Returns:
            1-D, the pieces from slot 0, 1, ... one after the other.
        """
        if self.size == 1:
            return send.clone()
        received = send.new_empty(sum(recv_numels))
        self.recorder.add(self.handle.name, "all_to_all", tag, send, received)
        sizes = list(recv_numels), list(send_numels)
        self.handle.run(lambda group: dist.all_to_all_single(received, send, *sizes, group=group, async_op=True))
        return received

    def all_gather_uneven(self, local: Tensor, rows: Sequence[int], tag: str = "") -> list[Tensor]:
        """Gather tensors that differ in dimension 0.

        Args:
            local: (rows[rank], ...), contiguous.
            rows: Rows of every member's tensor.

        Returns:
            Every member's tensor, in group order.
        """
        if self.size == 1:
            return [local]
        longest = max(rows)
        padded = local
        if local.shape[0] < longest:  # gloo gathers equal sizes only
            padded = local.new_zeros(longest, *local.shape[1:])
            padded[: local.shape[0]] = local
        gathered = local.new_empty(self.size * longest, *local.shape[1:])
        self.recorder.add(self.handle.name, "all_gather", tag, padded, gathered)
        padded = padded.contiguous()
        self.handle.run(lambda group: all_gather_single(gathered, padded, group))
        if not longest:
            return [local] * self.size
        return [part[:n] for part, n in zip(gathered.split(longest), rows, strict=True)]

    def broadcast(self, tensor: Tensor, source: int, tag: str = "") -> Tensor:
        """Copy ``tensor`` of the member at group position ``source`` to all, in place."""
        if self.size > 1 and tensor.numel():
            self.recorder.add(self.handle.name, "broadcast", tag, tensor, tensor)
            self.handle.run(lambda group: dist.broadcast(tensor, group=group, group_src=source, async_op=True))
        return tensor


def all_gather_single(out: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start ``all_gather_into_tensor`` under the name that this torch prefers."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, tensor, group=group, async_op=True)
