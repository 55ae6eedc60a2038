"""Process groups behind swappable handles.

Modules and the gradient sync never keep a process group: they keep a handle, and a new view points the handle elsewhere.
A group that belongs to an old view can therefore not be used by accident.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch.distributed as dist

from lightning_ntp.errors import NTPError
from lightning_ntp.topology import Topology


class GroupHandle:
    """Where a channel leads at the moment.

    Attributes:
        name: What the channel is for, such as ``"tensor_parallel"``; used in records and messages.
        rank: Position of this member in the group.
        size: Members of the group. A group of one needs no process group.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.rank = 0
        self.size = 1
        self._process_group: dist.ProcessGroup | None = None

    def point_at(self, ranks: Sequence[int], rank: int, process_group: dist.ProcessGroup | None) -> None:
        """Lead to ``process_group``, whose members are the global ``ranks`` in group order; ``rank`` is this member's."""
        self.rank, self.size, self._process_group = list(ranks).index(rank), len(ranks), process_group

    @property
    def process_group(self) -> dist.ProcessGroup:
        if self._process_group is None:
            raise NTPError(f"channel {self.name!r} is not open: no process group was built for it")
        return self._process_group

    def close(self) -> None:
        """Destroy the group, if it is still there."""
        group, self._process_group = self._process_group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


@dataclass(frozen=True)
class Channels:
    """The channels of one member. Those of the sync and of the vote are never used by forward or backward.

    Attributes:
        tensor_parallel: The replica; collectives of forward and backward.
        reshard: The replica; gradients between compute and sync layout.
        data_parallel: This slot of every replica; ``None`` on an extra slot.
        control: All members, in rank order; small messages outside the step.
        replica_control: The replica; first and last leg of the vote.
        leader_control: Slot 0 of every replica, the middle leg; ``None`` on other slots.
    """

    tensor_parallel: GroupHandle
    reshard: GroupHandle
    data_parallel: GroupHandle | None
    control: GroupHandle
    replica_control: GroupHandle
    leader_control: GroupHandle | None

    def close(self) -> None:
        """Destroy this member's groups."""
        for channel in fields(self):
            handle: GroupHandle | None = getattr(self, channel.name)
            if handle is not None:
                handle.close()


def open_channels(
    topology: Topology,
    rank: int,
    *,
    backend: str = "gloo",
    timeout: datetime.timedelta | None = None,
) -> Channels:
    """Build the groups of a topology on the default process group. Every member must call this at the same time.

    Args:
        topology: Who sits where.
        rank: This member's global rank.
        backend: For tensors of the model; control groups are always gloo (CPU tensors).
        timeout: Of every collective; torch's default if not given.
    """
    replica, slot = topology.place(rank)
    replicas = [topology.tensor_parallel_ranks(index) for index in range(topology.num_replicas)]
    columns = [topology.data_parallel_ranks(index) for index in range(topology.sync_degree)]
    world, leaders = tuple(range(topology.world_size)), topology.data_parallel_ranks(0)

    def build(name: str, rank_lists: Sequence[Sequence[int]], own: int | None, kind: str) -> GroupHandle | None:
        # new_group is called by all members for all groups, in one order; otherwise they wait for each other.
        groups = [_new_group(ranks, kind, timeout, f"{name}{i}") for i, ranks in enumerate(rank_lists)]
        if own is None:
            return None
        handle = GroupHandle(name)
        handle.point_at(rank_lists[own], rank, groups[own])
        return handle

    return Channels(
        tensor_parallel=build("tensor_parallel", replicas, replica, backend),
        reshard=build("reshard", replicas, replica, backend),
        data_parallel=build("data_parallel", columns, slot if slot < topology.sync_degree else None, backend),
        control=build("control", [world], 0, "gloo"),
        replica_control=build("replica_control", replicas, replica, "gloo"),
        leader_control=build("leader_control", [leaders], 0 if slot == 0 else None, "gloo"),
    )


def _new_group(
    ranks: Sequence[int], backend: str, timeout: datetime.timedelta | None, description: str
) -> dist.ProcessGroup | None:
    if len(ranks) == 1:
        return None
    return dist.new_group(list(ranks), timeout=timeout, backend=backend, group_desc=f"ntp_{description}")
