"""Move parameters and optimizer state from the slots of one view to those of the next.

For every parameter, and every optimizer-state tensor of its shape: a member keeps the units it has, and gets those that
its new slot wants besides from one source each, its own replica first. Chunks of parameters travel together in one
all-to-all; a parameter is replaced when its chunk is complete, so a move that fails in the middle leaves every
parameter whole, either in the old layout or in the new, and what a member holds says which.

What a member gives up lives on in the new view. It is kept until all members have the chunk; with a single replica,
where no other copy lives then, until the first commit in the new view.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ntp.comm.exchange import Exchange
from lightning_ntp.errors import MembershipError, ShardsLost
from lightning_ntp.layout import Replicated
from lightning_ntp.parallel.model import ParallelModel
from lightning_ntp.reshard import schema as schemas
from lightning_ntp.reshard.buffers import move_buffers
from lightning_ntp.reshard.place import Held, PeerState, Place
from lightning_ntp.reshard.planner import Leg, ParameterMove, Planner
from lightning_ntp.reshard.probe import check_elementwise
from lightning_ntp.reshard.rows import covers, from_bytes, is_same_part, no_bytes, row_numel, rows_of, to_bytes
from lightning_ntp.reshard.states import Key, OptimizerStates

CHUNK_BYTES = 64 * 2**20


@dataclass
class Holding:
    """One local part of a parameter: the place that it belongs to, and its tensors by key."""

    place: Place
    tensors: dict[Key, Tensor]


@dataclass
class MoveReport:
    """What a move cost this member, in bytes that crossed to or from others.

    Attributes:
        sent_bytes: Of parameters and their states.
        received_bytes: Of parameters and their states.
        buffer_bytes: Of module buffers, sent and received; only where somebody joins.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    buffer_bytes: int = 0


_Chunk = list[tuple[int, ParameterMove]]


class ShardKeeper:
    """This member's parts of the model and of the optimizers' states.

    A joiner has the same model, sharded for any place, with any content. Before it takes part in a move it must
    ``adopt`` the others' schema.

    Args:
        model: What this member holds; parameters keep their identity through every move.
        optimizers: Their states move with the parameters.
        place: Where this member is now; ``None`` for a joiner, whose tensors do not count.

    Raises:
        UnsupportedError: if an optimizer's update is not elementwise, or it has a state or an option that cannot move.
    """

    def __init__(self, model: ParallelModel, optimizers: Sequence[Optimizer], place: Place | None) -> None:
        self._module = model.module
        self._params = list(model.parameters())
        self._states = OptimizerStates(optimizers)
        self._current: list[Place | None] = [place] * len(self._params)
        self._kept: list[list[Holding]] = [[] for _ in self._params]
        for optimizer in optimizers:
            check_elementwise(optimizer)
        self.schema()

    def held(self) -> Held:
        """For each parameter the places whose parts are here, the current one first; empty for a joiner."""
        if not any(self._current):
            return ()
        return tuple(
            (() if place is None else (place,)) + tuple(holding.place for holding in kept)
            for place, kept in zip(self._current, self._kept, strict=True)
        )

    def forget_kept(self) -> None:
        """After the first commit in a new view: what was given up has a holder again."""
        self._kept = [[] for _ in self._params]

    # What all members must have alike

    def schema(self) -> dict[str, Any]:
        """Model and optimizers without their tensors, as plain JSON: names, shapes, options and scalars.

        Raises:
            UnsupportedError: if an optimizer has a state or an option that no joiner can be given.
        """
        self._states.refresh()
        return schemas.describe(self._params, self._states)

    def check(self, schema: Any) -> None:
        """Check that this member's schema equals ``schema``, that of another.

        Raises:
            MembershipError: names the first difference.
        """
        self._states.refresh()
        schemas.check_same(self._params, self._states, schema)

    def adopt(self, schema: Any) -> None:
        """Take over the scalars and options of the other members, and make room for their states; for a joiner.

        Raises:
            MembershipError: if the model or the optimizers are others; names the first difference.
            UnsupportedError: if an option cannot be handed over.
        """
        self._states.refresh()
        schemas.adopt(self._params, self._states, schema)

    # Moving

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
            MembershipError: if ``peers`` says that this member holds what it does not hold.
        """
        self._states.refresh()
        self._check_told(peers[exchange.rank])
        planner = Planner(peers)
        moves = [planner.move(param.layout, index) for index, param in enumerate(self._params)]
        self._refuse_lost(moves)
        report = MoveReport()
        report.buffer_bytes = sum(move_buffers(self._module, exchange, peers, self._device))
        for chunk in self._chunks(moves, chunk_bytes):
            self._move_chunk(exchange, peers[exchange.rank], chunk, report)
            if planner.num_replicas > 1:
                self._forget_given_up(exchange, chunk)
        return report

    @property
    def _device(self) -> torch.device:
        return self._params[0].parameter.device if self._params else torch.device("cpu")

    def _check_told(self, told: PeerState) -> None:
        mine = self.held()
        for index, places in enumerate(told.held):
            if not mine or mine[index][: len(places)] != places:
                name, here = self._params[index].name, mine[index] if mine else ()
                raise MembershipError(
                    f"the view says that {name} is held here at {places}, but it is at {here}: this member's record of "
                    "its shards is out of date"
                )

    def _refuse_lost(self, moves: Sequence[ParameterMove]) -> None:
        lost = [param.name for param, move in zip(self._params, moves, strict=True) if move.is_lost]
        if lost:
            shown = ", ".join(lost[:4]) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
            raise ShardsLost(f"no live member holds all of {shown}: go on from a checkpoint, or with more replicas")

    def _chunks(self, moves: Sequence[ParameterMove], chunk_bytes: int) -> Iterator[_Chunk]:
        """Parameters with their moves, in order, cut by size."""
        chunk: _Chunk = []
        filled = 0
        for index, move in enumerate(moves):
            size = self._params[index].dense_numel * self._params[index].parameter.element_size()
            if chunk and filled + size > chunk_bytes:
                yield chunk
                chunk, filled = [], 0
            chunk.append((index, move))
            filled += size
        if chunk:
            yield chunk

    def _move_chunk(self, exchange: Exchange, own: PeerState, chunk: _Chunk, report: MoveReport) -> None:
        me, size = exchange.rank, exchange.size
        outgoing: list[list[Tensor]] = [[] for _ in range(size)]
        incoming = [0] * size
        for index, move in chunk:
            for leg in move.legs:
                if leg.source == leg.target:
                    continue
                if leg.source == me:
                    outgoing[leg.target] += self._cut(index, leg)
                if leg.target == me:
                    incoming[leg.source] += self._leg_bytes(index, leg)
        sent = [sum(part.numel() for part in parts) for parts in outgoing]
        flat = [part for parts in outgoing for part in parts]
        received = no_bytes(self._device)
        if any(move.crosses for _, move in chunk):
            send = torch.cat(flat) if flat else received
            received = exchange.all_to_all(send, sent, incoming, tag="move")
        report.sent_bytes += sum(sent)
        report.received_bytes += sum(incoming)
        if own.target is not None:
            arrived = list(received.split(incoming))
            for index, move in chunk:
                self._install(index, own.holdings(index), own.target, move, me, arrived)

    def _install(
        self,
        index: int,
        held: tuple[Place, ...],
        target: Place,
        move: ParameterMove,
        me: int,
        arrived: list[Tensor],
    ) -> None:
        if held and held[0] == target:
            return  # a healthy replica's tensors stay what they are
        param = self._params[index]
        if held and is_same_part(param.layout, held[0], target):
            param.parameter.grad = None
            self._current[index] = target
            return
        shape = param.local_shape(target.degree, target.slot)
        fresh = {key: tensor.new_empty(shape) for key, tensor in self._states.tensors(param).items()}
        for old_row, new_row, rows in move.kept.get(me, ()):
            self._copy_own(index, fresh, Leg(me, 0, me, old_row, new_row, rows))
        for leg in move.legs:
            if leg.target != me:
                continue
            if leg.source == me:
                self._copy_own(index, fresh, leg)
            else:
                arrived[leg.source] = self._paste(index, fresh, leg, arrived[leg.source])
        self._replace(index, held, target, fresh)

    def _replace(self, index: int, held: tuple[Place, ...], target: Place, fresh: dict[Key, Tensor]) -> None:
        param = self._params[index]
        if held and not isinstance(param.layout, Replicated) and not covers(param.layout, target, held[0]):
            self._kept[index].insert(0, Holding(held[0], self._states.tensors(param)))
        self._states.put(param, fresh)
        param.parameter.grad = None  # of the old layout
        self._current[index] = target

    def _forget_given_up(self, exchange: Exchange, chunk: _Chunk) -> None:
        """Drop what the chunk's parameters leave behind: every unit lives in each of the new view's replicas.

        Only once all members have it. Before, the death of another holder could leave this copy alone.
        """
        if any(move.crosses for _, move in chunk):
            exchange.all_reduce(torch.zeros(1, dtype=torch.uint8, device=self._device), tag="moved")
        for index, _ in chunk:
            self._kept[index] = []

    # Rows

    def _holding(self, index: int, number: int) -> dict[Key, Tensor]:
        if number == 0:
            return self._states.tensors(self._params[index])
        return self._kept[index][number - 1].tensors

    def _cut(self, index: int, leg: Leg) -> list[Tensor]:
        """The rows of a leg as bytes, one tensor a key."""
        layout = self._params[index].layout
        return [
            to_bytes(rows_of(tensor, layout).narrow(0, leg.source_row, leg.rows), self._device)
            for _, tensor in sorted(self._holding(index, leg.holding).items())
        ]

    def _leg_bytes(self, index: int, leg: Leg) -> int:
        param = self._params[index]
        sizes = sum(tensor.element_size() for tensor in self._states.tensors(param).values())
        return leg.rows * row_numel(param) * sizes

    def _paste(self, index: int, fresh: Mapping[Key, Tensor], leg: Leg, data: Tensor) -> Tensor:
        """Write the rows of a leg; returns what is left of ``data``."""
        for _, tensor in sorted(fresh.items()):
            rows = rows_of(tensor, self._params[index].layout).narrow(0, leg.target_row, leg.rows)
            nbytes = rows.numel() * tensor.element_size()
            rows.copy_(from_bytes(data[:nbytes], tensor.dtype, rows.shape))
            data = data[nbytes:]
        return data

    def _copy_own(self, index: int, fresh: Mapping[Key, Tensor], leg: Leg) -> None:
        layout, old = self._params[index].layout, self._holding(index, leg.holding)
        for key, tensor in fresh.items():
            target = rows_of(tensor, layout).narrow(0, leg.target_row, leg.rows)
            target.copy_(rows_of(old[key], layout).narrow(0, leg.source_row, leg.rows))
