"""One member with all that it needs to train: its place, its channels, its part of the model, sync and vote."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ntp.comm.exchange import Exchange, Recorder
from lightning_ntp.comm.groups import Channels, GroupHandle, open_channels, world_handle
from lightning_ntp.comm.lane import open_lane
from lightning_ntp.comm.tree import ControlTree
from lightning_ntp.engine.vote import NO_WISHES, Ballot, Vote, Wishes, clip_by_norm
from lightning_ntp.errors import ConfigError, NTPError
from lightning_ntp.parallel import ParallelModel, ParallelPlan, TensorParallelContext, parallelize
from lightning_ntp.sync import GradientSync, SyncChannels
from lightning_ntp.topology import Topology


class Member:
    """Works with or without a Trainer: the Lightning strategies only translate to it.

    The default process group must exist and hold all members in rank order.

    Args:
        topology: Who sits where.
        rank: This member.
        device: Where its tensors live.
        backend: Of the groups that carry the model's tensors.
        lowest_degree: The lowest degree that a replica may reach later.
        timeout: Of every collective.
        channels: Those of a view, opened by the caller; without them they are opened here.
    """

    def __init__(
        self,
        topology: Topology,
        rank: int,
        *,
        device: torch.device | str = "cpu",
        backend: str = "gloo",
        lowest_degree: int = 1,
        timeout: datetime.timedelta | None = None,
        channels: Channels | None = None,
    ) -> None:
        self.device, self.recorder = torch.device(device), Recorder()
        self._backend = backend
        self._enter(topology, rank, channels or open_channels(topology, rank, backend=backend, timeout=timeout))
        self.context = TensorParallelContext.at(
            self._exchange(self._channels.tensor_parallel),
            topology.degrees[self.replica],
            self.slot,
            topology.nominal_degree,
            min(lowest_degree, topology.sync_degree),
        )
        self._model: ParallelModel | None = None
        self._sync: GradientSync | None = None
        self._ballot: Ballot | None = None
        self._sync_options: dict[str, Any] = {}
        self._is_between_views = False

    @property
    def number(self) -> int:
        """The number of this member's replica: part of its seat, so that it stays when another replica is lost."""
        return self.topology.members[self.rank].replica

    @property
    def is_leader(self) -> bool:
        return self.rank == self.topology.leader

    @property
    def model(self) -> ParallelModel:
        return self._built(self._model)

    @property
    def built_model(self) -> ParallelModel | None:
        """The model, if there is one yet."""
        return self._model

    @property
    def sync(self) -> GradientSync:
        return self._built(self._sync)

    def shard(self, module: nn.Module, plan: ParallelPlan) -> ParallelModel:
        """Give all members the leader's weights, then keep this slot's part of them. Changes ``module`` in place."""
        self.copy_leaders([*module.parameters(), *module.buffers()])
        return self.cut(module, plan)

    def cut(self, module: nn.Module, plan: ParallelPlan) -> ParallelModel:
        """Keep this slot's part of a module whose weights are the leader's already. Changes it in place."""
        self._model = parallelize(module, plan, self.context)
        return self._model

    def adopt(self, model: ParallelModel) -> ParallelModel:
        """Take over a model that an earlier member of this process has sharded, at the same place.

        Raises:
            ConfigError: if it was sharded for another place.
        """
        theirs, ours = model.context, self.context
        if (theirs.nominal_degree, theirs.degree, theirs.slot) != (ours.nominal_degree, ours.degree, ours.slot):
            raise ConfigError(
                f"the model is sharded for slot {theirs.slot} of degree {theirs.degree} "
                f"(tensor_parallel_size={theirs.nominal_degree}), this job wants slot {ours.slot} of degree "
                f"{ours.degree} (tensor_parallel_size={ours.nominal_degree}): build the model anew for other degrees"
            )
        theirs.exchange = ours.exchange
        self.context, self._model = theirs, model
        return model

    def start_sync(
        self,
        *,
        bucket_cap_mb: float = 25.0,
        reduce_dtype: torch.dtype | None = None,
    ) -> GradientSync:
        """Hook the gradient sync into the model, once its parameters are on their device and in their dtype."""
        self._sync_options = {"bucket_cap_mb": bucket_cap_mb, "reduce_dtype": reduce_dtype}
        channels = SyncChannels(
            reshard=self._exchange(self._channels.reshard),
            data_parallel=self._channels.data_parallel and self._exchange(self._channels.data_parallel),
            control=self.control,
            counts=self.slot == 0,
        )
        self._sync = GradientSync(
            self.model,
            self.topology,
            self.rank,
            channels,
            open_lane(self.device, self._backend),
            bucket_cap_mb=bucket_cap_mb,
            reduce_dtype=reduce_dtype,
            # CUDA kernels may sum in another order from run to run, so copies there are handed out by one slot.
            equal_copies=self.device.type == "cpu",
        )
        self._ballot = Ballot(self.model, self._sync, self.tree, self.topology, self.rank)
        return self._sync

    def leave_view(self) -> None:
        """Let go of the channels of a generation that has ended."""
        self._is_between_views |= self._sync is not None
        self.stop_sync()

    def enter_view(self, topology: Topology, rank: int, channels: Channels) -> None:
        """Take the place that a new view gives, once the shards for it are here: modules and gradient sync follow.

        Args:
            topology: Of the new view.
            rank: This member's place in it.
            channels: Opened for it; the old ones are left to the caller.
        """
        self.leave_view()
        self._enter(topology, rank, channels)
        self.context.move_to(self._exchange(channels.tensor_parallel), topology.degrees[self.replica], self.slot)
        if self._model is not None:
            self._model.relocate()
        if self._is_between_views:
            self._is_between_views = False
            self.start_sync(**self._sync_options)

    def copy_leaders(self, tensors: Iterable[Tensor]) -> None:
        """Give all members the leader's values of dense tensors, in place. All members must ask."""
        if self.world.size == 1:
            return
        for tensor in tensors:
            data: Tensor = tensor.detach()
            whole = data.to(self.device).contiguous()  # nccl needs it there; one tensor at a time
            self.world.broadcast(whole, source=self.topology.leader, tag="weights")
            if whole.data_ptr() != data.data_ptr():
                data.copy_(whole)

    def vote(
        self, parameters: Sequence[nn.Parameter], wishes: Wishes = NO_WISHES, rider: Tensor | None = None
    ) -> Vote:
        """Agree on a step of the optimizer that owns ``parameters``; see ``Ballot.cast``."""
        return self._built(self._ballot).cast(parameters, wishes, rider)

    @property
    def ballot(self) -> Ballot:
        return self._built(self._ballot)

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> float:
        """2-norm of the dense synced gradient; all members must ask."""
        return self._built(self._ballot).grad_norm(parameters)

    def clip(self, parameters: Sequence[nn.Parameter], vote: Vote, max_norm: float) -> None:
        clip_by_norm(parameters, vote.grad_norm, max_norm)

    def stop_sync(self) -> None:
        """Take hooks and thread of the gradient sync away."""
        if self._sync is not None:
            self._sync.remove()
            self._sync = None

    def close(self) -> None:
        """Stop the sync and close the channels. All members must do so; nothing may be under way."""
        self.stop_sync()
        self._channels.close()

    def _enter(self, topology: Topology, rank: int, channels: Channels) -> None:
        self.topology, self.rank, self._channels = topology, rank, channels
        self.replica, self.slot = topology.place(rank)
        self.control = self._exchange(channels.control)
        leaders = channels.leader_control and self._exchange(channels.leader_control)
        self.tree = ControlTree(self._exchange(channels.replica_control), leaders)
        control = channels.control  # a member that acts alone has channels of size 1
        at = rank if control.size > 1 else 0
        self.world = self._exchange(world_handle(control.size, at, control.progress, control.abort))

    def _exchange(self, handle: GroupHandle) -> Exchange:
        return Exchange(handle, self.recorder)

    @staticmethod
    def _built(part):
        if part is None:
            raise NTPError("the member is not ready: call shard() and start_sync() first")
        return part
