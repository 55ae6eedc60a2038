"""Move parameters and optimizer state from the slots of one view to those of the next.

For every parameter, and every optimizer-state tensor of its shape: a member keeps the units it has, and gets those that
its new slot wants besides from one source each, its own replica first. Chunks of parameters travel together in one
all-to-all; a parameter is replaced when its chunk is complete, so a move that fails in the middle leaves every
parameter whole, either in the old layout or in the new, and what a member holds says which.

What a member gives up is kept until the first commit in the new view: until then it may be the only copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ntp.comm.exchange import Exchange
from lightning_ntp.errors import MembershipError, ShardsLost, UnsupportedError
from lightning_ntp.layout import Holder, ParameterLayout, Replicated, Sharded, Slice, Transfer, plan_transfer
from lightning_ntp.parallel.model import ParallelModel, ParallelParameter

PARAMETER = ""  # the key of the parameter itself among its tensors
CHUNK_BYTES = 64 * 2**20

# A member's second, third ... holding of a parameter is planned as if another member of its replica had it.
_HOLDINGS = 8


@dataclass(frozen=True)
class Place:
    """A slot of a replica of some degree."""

    replica: int
    degree: int
    slot: int


@dataclass(frozen=True)
class PeerState:
    """What one member of the new view holds, and where it goes.

    Attributes:
        held: For each parameter the places whose parts it holds, the current one first; empty for a joiner.
        target: Its place in the new view; ``None`` for one that leaves and only hands over.
    """

    held: tuple[tuple[Place, ...], ...]
    target: Place | None


@dataclass
class Holding:
    """One local part of a parameter: the place that it belongs to, and its tensors by key."""

    place: Place
    tensors: dict[str, Tensor]


@dataclass
class MoveReport:
    """What a move cost this member, in bytes that crossed to or from others."""

    sent_bytes: int = 0
    received_bytes: int = 0


class ShardKeeper:
    """This member's parts of the model and of the optimizers' states.

    Args:
        model: What this member holds; parameters keep their identity through every move.
        optimizers: Their states move with the parameters.
        place: Where this member is now.

    Raises:
        UnsupportedError: if a state tensor has another shape than its parameter and more than one element.
    """

    def __init__(self, model: ParallelModel, optimizers: Sequence[Optimizer], place: Place) -> None:
        self._params = list(model.parameters())
        self._optimizers = list(optimizers)
        self._owner = {p: o for o in self._optimizers for group in o.param_groups for p in group["params"]}
        self._current = [place] * len(self._params)
        self._kept: list[list[Holding]] = [[] for _ in self._params]
        for param in self._params:
            self._state_keys(param)

    def held(self) -> tuple[tuple[Place, ...], ...]:
        """For each parameter the places whose parts are here, the current one first."""
        return tuple(
            (place, *(holding.place for holding in kept)) for place, kept in zip(self._current, self._kept, strict=True)
        )

    def forget_kept(self) -> None:
        """After the first commit in a new view: what was given up has a holder again."""
        self._kept = [[] for _ in self._params]

    def move(
        self, exchange: Exchange, peers: Sequence[PeerState], chunk_bytes: int = CHUNK_BYTES
    ) -> MoveReport:
        """Move everything to its place in the new view. All members of ``exchange`` must call this alike.

        Args:
            exchange: All members of the new view, and those that leave in an orderly way.
            peers: State of each of them, in group order.
            chunk_bytes: Dense bytes that travel together at the most (one parameter at least).

        Raises:
            ShardsLost: if some part has no live holder. Every member comes to the same result before anything moves.
        """
        plans = [self._plan(index, param, peers) for index, param in enumerate(self._params)]
        self._refuse_lost(plans)
        report = MoveReport()
        for chunk in self._chunks(plans, chunk_bytes):
            self._move_chunk(exchange, peers, chunk, report)
        return report

    # Planning

    def _plan(self, index: int, param: ParallelParameter, peers: Sequence[PeerState]) -> Transfer:
        before = tuple(
            Holder(rank * _HOLDINGS + number, place.replica, place.degree, place.slot)
            for rank, peer in enumerate(peers)
            if peer.held
            for number, place in enumerate(peer.held[index][:_HOLDINGS])
        )
        after = tuple(
            Holder(rank * _HOLDINGS, peer.target.replica, peer.target.degree, peer.target.slot)
            for rank, peer in enumerate(peers)
            if peer.target is not None
        )
        return _plan_parameter(param.layout, before, after, index)

    def _refuse_lost(self, plans: Sequence[Transfer]) -> None:
        lost = [p.name for p, plan in zip(self._params, plans, strict=True) if plan.lost]
        if lost:
            shown = ", ".join(lost[:4]) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
            raise ShardsLost(f"no live member holds all of {shown}: go on from a checkpoint, or with more replicas")

    def _chunks(self, plans: Sequence[Transfer], chunk_bytes: int) -> Iterator[list[tuple[int, Transfer]]]:
        """Parameters with their plans, in order, cut by size."""
        chunk: list[tuple[int, Transfer]] = []
        filled = 0
        for index, plan in enumerate(plans):
            size = self._params[index].dense_numel * self._params[index].parameter.element_size()
            if chunk and filled + size > chunk_bytes:
                yield chunk
                chunk, filled = [], 0
            chunk.append((index, plan))
            filled += size
        if chunk:
            yield chunk

    # Moving

    def _move_chunk(
        self,
        exchange: Exchange,
        peers: Sequence[PeerState],
        chunk: Sequence[tuple[int, Transfer]],
        report: MoveReport,
    ) -> None:
        me, size = exchange.rank, exchange.size
        outgoing: list[list[Tensor]] = [[] for _ in range(size)]
        incoming = [0] * size
        for index, plan in chunk:
            for piece in plan.slices:
                source, target = piece.source // _HOLDINGS, piece.target // _HOLDINGS
                if source == target:
                    continue
                if source == me:
                    outgoing[target] += self._cut(index, piece)
                if target == me:
                    incoming[source] += self._piece_bytes(index, piece)
        sent = [sum(part.numel() for part in parts) for parts in outgoing]
        flat = [part for parts in outgoing for part in parts]
        anything = any(plan.slices for _, plan in chunk)
        received = _empty(self._params[0].parameter.device)
        if anything:
            send = torch.cat(flat) if flat else received
            received = exchange.all_to_all(send, sent, incoming, tag="move")
        report.sent_bytes += sum(sent)
        report.received_bytes += sum(incoming)
        self._install(peers[me].target, me, chunk, list(received.split(incoming)))

    def _install(
        self, target: Place | None, me: int, chunk: Sequence[tuple[int, Transfer]], arrived: list[Tensor]
    ) -> None:
        if target is None:
            return
        for index, plan in chunk:
            if self._current[index] == target:
                continue  # a healthy replica's tensors stay what they are
            fresh = self._new_tensors(index, target)
            for old_row, new_row, rows in plan.kept.get(me * _HOLDINGS, ()):
                self._copy_own(index, 0, fresh, old_row, new_row, rows)
            for piece in plan.slices:
                source, number = divmod(piece.source, _HOLDINGS)
                if piece.target // _HOLDINGS != me:
                    continue
                if source == me:
                    self._copy_own(index, number, fresh, piece.source_row, piece.target_row, piece.rows)
                else:
                    arrived[source] = self._paste(index, fresh, piece, arrived[source])
            self._replace(index, target, fresh)

    def _replace(self, index: int, target: Place, fresh: dict[str, Tensor]) -> None:
        param, old = self._params[index], self._tensors(index)
        place = self._current[index]
        layout = param.layout
        if isinstance(layout, Sharded) and place != target and not _covers(layout, target, place):
            self._kept[index].insert(0, Holding(place, old))
        state = self._state(param)
        for key, tensor in fresh.items():
            if key == PARAMETER:
                param.parameter.data = tensor
            else:
                state[key] = tensor
        param.parameter.grad = None  # of the old layout
        self._current[index] = target

    # Tensors

    def _state(self, param: ParallelParameter) -> dict[str, Tensor]:
        optimizer = self._owner.get(param.parameter)
        return {} if optimizer is None else optimizer.state.get(param.parameter, {})

    def _state_keys(self, param: ParallelParameter) -> list[str]:
        keys = []
        for key, value in sorted(self._state(param).items()):
            if not isinstance(value, Tensor) or value.numel() == 1 and value.dim() == 0:
                continue
            if value.shape != param.parameter.shape:
                raise UnsupportedError(
                    f"optimizer {type(self._owner[param.parameter]).__name__} keeps {key!r} of shape "
                    f"{tuple(value.shape)} for {param.name!r} of shape {tuple(param.parameter.shape)}: only states of "
                    "the parameter's shape can move between slots; use AdamW, Adam or SGD, or fault_tolerance=False"
                )
            keys.append(key)
        return keys

    def _tensors(self, index: int) -> dict[str, Tensor]:
        param = self._params[index]
        state = self._state(param)
        return {PARAMETER: param.parameter.data, **{key: state[key] for key in self._state_keys(param)}}

    def _new_tensors(self, index: int, target: Place) -> dict[str, Tensor]:
        param = self._params[index]
        shape = param.local_shape(target.degree, target.slot)
        return {key: tensor.new_empty(shape) for key, tensor in self._tensors(index).items()}

    def _holding(self, index: int, number: int) -> dict[str, Tensor]:
        return self._tensors(index) if number == 0 else self._kept[index][number - 1].tensors

    def _cut(self, index: int, piece: Slice) -> list[Tensor]:
        """The rows of a slice as bytes, one tensor a key."""
        tensors = self._holding(index, piece.source % _HOLDINGS)
        layout = self._params[index].layout
        return [
            _rows(tensor, layout).narrow(0, piece.source_row, piece.rows).contiguous().flatten().view(torch.uint8)
            for _, tensor in sorted(tensors.items())
        ]

    def _piece_bytes(self, index: int, piece: Slice) -> int:
        param = self._params[index]
        row = param.dense_numel // _dense_rows(param)
        return piece.rows * row * sum(tensor.element_size() for tensor in self._tensors(index).values())

    def _paste(self, index: int, fresh: Mapping[str, Tensor], piece: Slice, data: Tensor) -> Tensor:
        """Write the rows of a slice; returns what is left of ``data``."""
        layout = self._params[index].layout
        for _, tensor in sorted(fresh.items()):
            rows = _rows(tensor, layout).narrow(0, piece.target_row, piece.rows)
            nbytes = rows.numel() * tensor.element_size()
            part, data = data[:nbytes], data[nbytes:]
            rows.copy_(part.clone().view(tensor.dtype).view(rows.shape))  # a clone: the bytes may be unaligned
        return data

    def _copy_own(
        self, index: int, number: int, fresh: Mapping[str, Tensor], old_row: int, new_row: int, rows: int
    ) -> None:
        layout = self._params[index].layout
        old = self._holding(index, number)
        for key, tensor in fresh.items():
            _rows(tensor, layout).narrow(0, new_row, rows).copy_(_rows(old[key], layout).narrow(0, old_row, rows))


def _plan_parameter(
    layout: ParameterLayout, before: tuple[Holder, ...], after: tuple[Holder, ...], turn: int
) -> Transfer:
    if isinstance(layout, Replicated):
        return _plan_replicated(before, after, turn)
    return _plan_sharded(layout, before, after)


@lru_cache(maxsize=256)
def _plan_sharded(layout: Sharded, before: tuple[Holder, ...], after: tuple[Holder, ...]) -> Transfer:
    return plan_transfer(layout, before, after)


def _plan_replicated(before: tuple[Holder, ...], after: tuple[Holder, ...], turn: int) -> Transfer:
    """A whole copy is one row: only who has none needs it."""
    have = {holder.member for holder in before}
    slices, kept = [], {}
    for target in after:
        if target.member in have:
            kept[target.member] = ((0, 0, 1),)
            continue
        near = [holder.member for holder in before if holder.replica == target.replica]
        sources = near or [holder.member for holder in before]
        if sources:
            slices.append(Slice(sources[turn % len(sources)], target.member, 0, 0, 1))
    return Transfer(tuple(slices), kept, ((0, 1),) if not before else ())


@lru_cache(maxsize=4096)
def _covers(layout: Sharded, new: Place, old: Place) -> bool:
    """Whether the part at ``new`` contains that at ``old``."""
    units = {(piece.segment, piece.unit) for piece in layout.pieces(new.degree, new.slot)}
    return all((piece.segment, piece.unit) in units for piece in layout.pieces(old.degree, old.slot))


def _rows(tensor: Tensor, layout: ParameterLayout) -> Tensor:
    return tensor.reshape(1, -1) if isinstance(layout, Replicated) else tensor.movedim(layout.dim, 0)


def _dense_rows(param: ParallelParameter) -> int:
    return 1 if isinstance(param.layout, Replicated) else param.layout.extent


def _empty(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device)


Held = tuple[tuple[Place, ...], ...]


def held_to_json(held: Held) -> list[list[Any]]:
    """What a member holds, as plain data: runs of parameters that are held at the same places."""
    runs: list[list[Any]] = []
    for places in held:
        tag = [[place.replica, place.degree, place.slot] for place in places]
        if runs and runs[-1][1] == tag:
            runs[-1][0] += 1
        else:
            runs.append([1, tag])
    return runs


def held_from_json(data: Any) -> Held:
    """Read ``held_to_json``; ``None`` is a joiner, who holds nothing.

    Raises:
        MembershipError: if it is anything else.
    """
    try:
        return tuple(
            tuple(Place(*map(int, place)) for place in tag) for count, tag in data or () for _ in range(int(count))
        )
    except (TypeError, ValueError) as error:
        raise MembershipError(f"a member's record of its shards cannot be read: {data!r}: {error}") from None
