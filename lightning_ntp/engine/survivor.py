"""A member that trains on when others die: recovery in two halves around the steps.

*Agree, inside the failing call.* A member that meets a failure leaves all collectives and agrees on the next view. The
view commits step c. A member that was in the vote on c gets the decided vote and finishes the step as if nothing had
happened; a member that had not arrived at the step yet runs it again.

*Change, at the entry of the next step.* New channels, the shards that this member lacks, and its new slot.

Nothing is ever undone: a step is applied only after the vote on it, and passing the vote means that all had arrived.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import Store
from torch.optim import Optimizer

from lightning_ntp.comm.abortable import GenerationWorld
from lightning_ntp.comm.exchange import Exchange
from lightning_ntp.comm.groups import Channels, open_channels, world_handle
from lightning_ntp.engine.member import Member
from lightning_ntp.engine.vote import Vote
from lightning_ntp.errors import GenerationOver, NTPError
from lightning_ntp.membership.agreement import Standing
from lightning_ntp.membership.member import Membership
from lightning_ntp.membership.view import View
from lightning_ntp.parallel import ParallelPlan
from lightning_ntp.reshard import MoveReport, PeerState, Place, ShardKeeper, held_from_json, held_to_json

log = logging.getLogger(__name__)


class Replay(NTPError):
    """The step under way was not committed and has to be run again. Raised by ``commit``, caught by ``run_step``."""


@dataclass
class _Snapshot:
    """What a second run of a step must find as the first did."""

    torch_rng: Tensor
    numpy_rng: Any
    python_rng: Any
    buffers: list[tuple[Tensor, Tensor]]

    @classmethod
    def take(cls, module: nn.Module) -> _Snapshot:
        buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        return cls(torch.get_rng_state(), np.random.get_state(), random.getstate(), buffers)

    def restore(self) -> None:
        torch.set_rng_state(self.torch_rng)
        np.random.set_state(self.numpy_rng)
        random.setstate(self.python_rng)
        for buffer, before in self.buffers:
            if buffer.shape == before.shape:
                buffer.data.copy_(before)


class Survivor:
    """One member of a job that goes on through deaths; without a Trainer.

    Args:
        membership: Its side of the agreement; not yet started.
        store: A client of the job's store, for the groups' rendezvous; no other thread may block it.
        device: Where its tensors live.
        lowest_degree: The lowest degree that a replica may reach.

    Attributes:
        member: Its part of the model; there once ``start`` has returned.
        applied: The last step that the optimizer has taken; -1 before the first.
        moves: What each change of view cost.
    """

    def __init__(
        self,
        membership: Membership,
        store: Store,
        *,
        device: torch.device | str = "cpu",
        lowest_degree: int = 1,
    ) -> None:
        self._membership, self._store = membership, store
        self._device, self._lowest_degree = device, lowest_degree
        self._world: GenerationWorld | None = None
        self._channels: Channels | None = None
        self._keeper: ShardKeeper | None = None
        self._pending: View | None = None
        self._vote: tuple[int, Vote] | None = None
        self.arrived = self.applied = -1
        self.moves: list[MoveReport] = []

    @property
    def view(self) -> View:
        """The newest view that this member has agreed on."""
        return self._membership.view

    # Life

    def start(self, module: nn.Module, plan: ParallelPlan, **sync_options: Any) -> Member:
        """Join the job's first view, take the leader's weights and keep this slot's part of them.

        Args:
            module: The dense model; changed in place.
            plan: What is sharded.
            sync_options: Of ``Member.start_sync``.
        """
        self._membership.start()
        view = self._membership.agree(Standing())
        rank = view.rank(self._membership.seat)
        channels = self._open(view)
        self.member = Member(
            view.topology, rank, device=self._device, lowest_degree=self._lowest_degree, channels=channels
        )
        self.member.shard(module, plan)
        self.member.start_sync(**sync_options)
        self._membership.run()
        return self.member

    def own(self, optimizers: Sequence[Optimizer]) -> None:
        """Name the optimizers: their states move with the parameters.

        Raises:
            UnsupportedError: if a state cannot move between slots.
        """
        self._keeper = ShardKeeper(self.member.model, optimizers, self._place(self.view))

    def finish(self) -> None:
        """End when all members have done their last step; until then, help those that recover."""
        while True:
            try:
                self._enter_pending()
                self._membership.finish()
                break
            except RuntimeError as error:
                self._leave_and_agree(error)
        self.member.stop_sync()
        self._close_world()

    # Steps

    def run_step(self, step_fn: Callable[[Any], Any], batch: Any) -> Any:
        """Run one step until it is committed; a step that a failure interrupts is run again in the next view.

        Args:
            step_fn: Forward, backward and ``commit`` of one step, from its batch.
            batch: The batch, or a function of the view that draws it: after a failure replicas may take other shares.

        Returns:
            What ``step_fn`` returns in its last run.

        Raises:
            ShardsLost: if some part of the model has no live holder; said alike by all survivors.
            RuntimeError: the user's own.
        """
        snapshot = _Snapshot.take(self.member.model.module)
        while True:
            try:
                self._enter_pending()
                self._membership.abort.check()
                self._membership.progress.step, self._membership.progress.phase = self.applied + 1, "forward"
                return step_fn(batch(self.view) if callable(batch) else batch)
            except Replay as reason:
                log.info("%s", reason)
            except RuntimeError as error:
                # The error must be gone before anything changes shape: its frames hold the graph of the failed pass.
                self._leave_and_agree(error)
            snapshot.restore()

    def commit(self, optimizer: Optimizer, max_norm: float | None = None) -> Vote:
        """Vote on the synced gradients, clip, and take the optimizer's step.

        Raises:
            Replay: if the step was not committed; ``run_step`` runs it again.
        """
        step, parameters = self.applied + 1, [p for group in optimizer.param_groups for p in group["params"]]
        self.arrived = step
        self._membership.progress.phase = "vote"
        vote = self._vote_on(step, parameters)
        self._vote = (step, vote)
        if max_norm is not None:
            self.member.clip(parameters, vote, max_norm)
        self._membership.progress.phase = "step"
        optimizer.step()
        self.applied = step
        if self._pending is None and self._keeper is not None:
            self._keeper.forget_kept()
        return vote

    def _vote_on(self, step: int, parameters: Sequence[nn.Parameter]) -> Vote:
        try:
            self._membership.abort.check()
            return self.member.vote(parameters)
        except RuntimeError as error:
            self._leave_and_agree(error)
        while True:
            try:
                return self._settle(step, parameters)
            except GenerationOver as error:
                self._leave_and_agree(error)

    # First half: agree

    def _leave_and_agree(self, error: Exception) -> None:
        """Leave the failed generation for the next view, as often as that fails too."""
        while True:
            self._membership.leave(error)
            try:
                self._pending = self._membership.agree(self._standing())
                return
            except GenerationOver as again:
                error = again

    def _standing(self) -> Standing:
        vote = None if self._vote is None else {"step": self._vote[0], **self._vote[1].to_json()}
        held = None if self._keeper is None else held_to_json(self._keeper.held())
        return Standing(self.arrived, self.applied, vote, held)

    def _settle(self, step: int, parameters: Sequence[nn.Parameter]) -> Vote:
        """The vote on ``step``, as the new view knows it or as the survivors can count it.

        Raises:
            Replay: if the view does not commit the step.
            GenerationOver: if another member died meanwhile.
        """
        view = self._pending
        assert view is not None
        if view.step < step:
            self.arrived = view.step
            raise Replay(f"step {step} is not committed in generation {view.generation}: it is run again")
        ballot = self.member.ballot
        if view.vote is not None:
            return ballot.settle(parameters, Vote.from_json(view.vote))
        # Nobody here has passed the vote: all are in it, so all count what they hold, each unit once.
        told = self._membership.exchange("ballot", self._count(view, parameters))
        square = sum(float.fromhex(answer["square"]) for answer in told.values())
        used = tuple(any(answer["used"][at] == "1" for answer in told.values()) for at in range(len(parameters)))
        return ballot.settle(parameters, Vote(square**0.5, used))

    def _count(self, view: View, parameters: Sequence[nn.Parameter]) -> Mapping[str, str]:
        places = [self._held_at(view, rank) for rank in range(len(view.members))]
        me = view.rank(self._membership.seat)
        square = self.member.ballot.square_among(parameters, [(p.degree, p.slot) for p in places], me)
        return {"square": square.hex(), "used": "".join("01"[flag] for flag in self.member.ballot.used(parameters))}

    def _held_at(self, view: View, rank: int) -> Place:
        """Where a member's gradients are: in the layout that it computed them in."""
        return held_from_json(view.holdings[view.members[rank]])[0][0]

    # Second half: change

    def _enter_pending(self) -> None:
        if self._pending is None:
            return
        view, keeper = self._pending, self._keeper
        assert keeper is not None, "a failure before own(optimizers) was called cannot be recovered from"
        self.member.stop_sync()
        self._close_world()
        channels = self._open(view)
        rank, topology = view.rank(self._membership.seat), view.topology
        peers = [
            PeerState(held_from_json(view.holdings[seat]), self._place(view, seat)) for seat in view.members
        ]
        world = Exchange(world_handle(topology.world_size, rank, self._membership.progress, self._membership.abort))
        self.moves.append(keeper.move(world, peers))
        self.member.enter_view(topology, rank, channels)
        self._membership.run()
        self._pending = None

    def _open(self, view: View) -> Channels:
        limits, progress = self._membership.timeouts, self._membership.progress
        progress.phase = "change"
        self._world = GenerationWorld(
            view.generation,
            self._store,
            self._membership.abort,
            timeout=timedelta(seconds=limits.collective_s),
            build_s=limits.build_s,
        )
        rank = view.rank(self._membership.seat)
        self._world.open(rank, view.topology.world_size)
        self._channels = open_channels(view.topology, rank, world=self._world, progress=progress)
        return self._channels

    def _close_world(self) -> None:
        if self._channels is not None:
            self._channels.forget()
            self._channels = None
        if self._world is not None:
            self._world.close()
            self._world = None

    def _place(self, view: View, seat: Any = None) -> Place:
        seat = self._membership.seat if seat is None else seat
        replica, slot = view.topology.place(view.rank(seat))
        return Place(seat.replica, view.topology.degrees[replica], slot)
