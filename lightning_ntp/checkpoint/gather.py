"""Put the slots' parts of a tensor together at the leader, and make sure beforehand that all slots will take part."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ntp.errors import CheckpointError
from lightning_ntp.layout import ParameterLayout, Replicated, Sharded, merge_rows
from lightning_ntp.parallel import ParallelModel, ParallelParameter, TensorParallelContext
from lightning_ntp.parallel.shards import take_local
from lightning_ntp.topology import Topology

Run = tuple[int, int, int]  # dense row, local row, rows


@dataclass(frozen=True)
class Part:
    """A slot's part of a dense tensor that a file shall hold.

    Attributes:
        label: What it is called in messages.
        tensor: The local tensor.
        layout: How the dense tensor lies on the slots.
        dense_shape: Its shape.
    """

    label: str
    tensor: Tensor
    layout: ParameterLayout
    dense_shape: torch.Size

    @classmethod
    def of(cls, label: str, tensor: Tensor, parameter: ParallelParameter) -> Part:
        """A tensor that lies on the slots as ``parameter`` does."""
        return cls(label, tensor, parameter.layout, parameter.dense_shape)

    def __str__(self) -> str:
        return f"{self.label} {self.tensor.dtype} {tuple(self.dense_shape)}"


def leader_slot(topology: Topology, rank: int) -> int | None:
    """The slot to which ``rank`` sends its parts: the leader's, or ``None`` outside the leader's replica."""
    leader_replica, slot = topology.place(topology.leader)
    return slot if topology.place(rank)[0] == leader_replica else None


def cpu_copy(tensor: Tensor) -> Tensor:
    """A copy in host memory that later steps do not change."""
    return tensor.detach().to("cpu", copy=True)


def device_of(model: ParallelModel) -> torch.device:
    """Where the model's collectives take their tensors from."""
    return next((each.parameter.device for each in model.parameters()), torch.device("cpu"))


def gather_dense(part: Part, context: TensorParallelContext, destination: int) -> Tensor | None:
    """The dense tensor in host memory on slot ``destination``, ``None`` elsewhere. Every slot of the replica calls it.

    A unit with several holders comes from its owner. On the device there are at most the packed and the received parts
    of this one tensor.
    """
    layout, degree = part.layout, context.degree
    if isinstance(layout, Replicated):
        return cpu_copy(part.tensor) if context.slot == destination else None
    runs = [owned_runs(layout, degree, slot) for slot in range(degree)]
    packed = _pack(part.tensor.detach(), layout.dim, runs[context.slot])
    numels = [sum(rows for _, _, rows in of_slot) * _row_numel(part, layout) for of_slot in runs]
    if degree > 1:
        packed = _send(packed, numels, context, destination, f"checkpoint {part.label}")
    if context.slot != destination:
        return None
    dense = torch.empty(part.dense_shape, dtype=part.tensor.dtype)
    for piece, of_slot in zip(packed.cpu().split(numels), runs, strict=True):
        _unpack(piece, dense, layout.dim, of_slot)
    return dense


def owned_runs(layout: Sharded, degree: int, slot: int) -> tuple[Run, ...]:
    """(dense_row, local_row, rows) of what ``slot`` contributes: over all slots each dense row once."""
    pieces = layout.pieces(degree, slot)
    owners = [segment.family.at(degree).owners for segment in layout.segments]
    return merge_rows(tuple(piece for piece in pieces if owners[piece.segment][piece.unit] == slot))


def cut_local(dense: Tensor, layout: ParameterLayout, context: TensorParallelContext) -> Tensor:
    """A slot's part of a dense tensor, to copy from: a view where its rows are neighbours, which costs no memory."""
    if isinstance(layout, Replicated):
        return dense
    runs = merge_rows(layout.pieces(context.degree, context.slot))
    if len(runs) == 1:
        return dense.narrow(layout.dim, runs[0][0], runs[0][2])
    return take_local(dense, layout, context.degree, context.slot)


def agree(parts: Sequence[Part], problems: Sequence[str], context: TensorParallelContext, device: torch.device) -> None:
    """Raise alike on all slots, before any part travels, if one has a problem or they want to send different things.

    Raises:
        CheckpointError: with this slot's problems, or a word on whose they are.
    """
    digest = zlib.crc32("\n".join(map(str, parts)).encode())
    verdict = torch.tensor([len(problems), digest, -digest], dtype=torch.int64, device=device)
    if context.degree > 1:
        context.exchange.all_reduce(verdict, op="max", tag="checkpoint agreement")
    highest, largest, smallest = verdict.tolist()
    if problems:
        raise CheckpointError("; ".join(problems))
    if highest:
        raise CheckpointError("another slot of this replica cannot save its part: see its own error")
    if largest != -smallest:
        raise CheckpointError(
            "the slots of this replica hold different sets of tensors, so they cannot be put together: a state_dict() "
            "or an optimizer that depends on the rank must give the same keys on every slot"
        )


def _send(
    packed: Tensor, numels: Sequence[int], context: TensorParallelContext, destination: int, tag: str
) -> Tensor:
    size = packed.element_size()
    sent, received = [0] * context.degree, [0] * context.degree
    sent[destination] = packed.nbytes
    if context.slot == destination:
        received = [numel * size for numel in numels]
    # As bytes: no back end needs to know the dtype.
    return context.exchange.all_to_all(packed.view(torch.uint8), sent, received, tag=tag).view(packed.dtype)


def _row_numel(part: Part, layout: Sharded) -> int:
    return torch.Size(size for dim, size in enumerate(part.dense_shape) if dim != layout.dim).numel()


def _pack(local: Tensor, dim: int, runs: Sequence[Run]) -> Tensor:
    rows = [local.narrow(dim, local_row, count).reshape(-1) for _, local_row, count in runs]
    return torch.cat(rows) if rows else local.new_empty(0)


def _unpack(piece: Tensor, dense: Tensor, dim: int, runs: Sequence[Run]) -> None:
    start = 0
    for dense_row, _, count in runs:
        target = dense.narrow(dim, dense_row, count)
        target.copy_(piece[start : start + target.numel()].view(target.shape))
        start += target.numel()
