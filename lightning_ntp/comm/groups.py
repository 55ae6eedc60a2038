"""Process groups behind swappable handles.

Modules and the gradient sync never keep a process group: they keep a handle, and a new view points the handle
elsewhere. A group that belongs to an old view can therefore not be used by accident.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch.distributed as dist

from lightning_ntp.comm.abort import Abort
from lightning_ntp.comm.abortable import GenerationWorld
from lightning_ntp.comm.progress import Progress
from lightning_ntp.compat import torch as compat
from lightning_ntp.errors import NTPError
from lightning_ntp.topology import Topology

# How often a waiting member looks at the failure flag; it is woken at once when the operation ends.
_LOOK_UP = datetime.timedelta(milliseconds=50)


class GroupHandle:
    """Where a channel leads at the moment.

    Attributes:
        name: What the channel is for, such as ``"tensor_parallel"``; used in records and messages.
        rank: Position of this member in the group.
        size: Members of the group. A group of one needs no process group.
        progress: Told of every collective that this member enters and leaves, if given.
        abort: Failure flag of the group's generation, if its members may die.
    """

    def __init__(self, name: str, progress: Progress | None = None, abort: Abort | None = None) -> None:
        self.name = name
        self.rank = 0
        self.size = 1
        self.progress, self.abort = progress, abort
        self._number = 0
        self._process_group: dist.ProcessGroup | None = None

    def point_at(self, ranks: Sequence[int], rank: int, process_group: dist.ProcessGroup | None) -> None:
        """Lead to ``process_group``, whose members are the global ``ranks`` in group order; ``rank`` is this
        member's."""
        self.rank, self.size, self._process_group = list(ranks).index(rank), len(ranks), process_group

    @property
    def process_group(self) -> dist.ProcessGroup:
        if self._process_group is None:
            raise NTPError(f"channel {self.name!r} is not open: no process group was built for it")
        return self._process_group

    def run(self, start: Callable[[dist.ProcessGroup], dist.Work]) -> None:
        """Run one collective to its end.

        Args:
            start: Starts it on the group, without waiting for it.

        Raises:
            GenerationOver: if the generation ended meanwhile. The operation may never end: it is left behind.
            RuntimeError: from the operation itself.
        """
        group = self.process_group
        self._number += 1
        try:
            if self.progress is not None:
                self.progress.enter(self.name, self._number)
            work = start(group)
            if self.abort is None or dist.get_backend(group) == "nccl":  # NCCL is aborted, and waits on its stream
                work.wait()
            else:
                self._wait(work, group, self.abort)
        except RuntimeError:
            if self.progress is not None:
                self.progress.fail(self.name)
            raise
        if self.progress is not None:
            self.progress.leave(self.name)

    @staticmethod
    def _wait(work: dist.Work, group: dist.ProcessGroup, abort: Abort) -> None:
        """Wait with an eye on the failure flag: poison leaves about one of a hundred sends in flight blocked."""
        while True:
            try:
                work.wait(_LOOK_UP)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # it may have ended between the time limit and this look: only its own error counts
                    return
                if abort.is_set:
                    # The destructor of either would block until the operation's timeout, or when Python ends.
                    compat.keep_for_good(work, group)
                    abort.check()

    def forget(self) -> None:
        """Lead nowhere: the group is destroyed elsewhere, and nothing may hold it."""
        self._process_group = None

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

    @property
    def handles(self) -> tuple[GroupHandle, ...]:
        """The channels that this member has."""
        found = (getattr(self, channel.name) for channel in fields(self))
        return tuple(handle for handle in found if handle is not None)

    def close(self) -> None:
        """Destroy this member's groups."""
        for handle in self.handles:
            handle.close()

    def forget(self) -> None:
        """Let go of the groups, which :meth:`GenerationWorld.close` destroys all at once."""
        for handle in self.handles:
            handle.forget()


def open_channels(
    topology: Topology,
    rank: int,
    *,
    backend: str = "gloo",
    timeout: datetime.timedelta | None = None,
    world: GenerationWorld | None = None,
    progress: Progress | None = None,
) -> Channels:
    """Build the groups of a topology on the default process group. Every member must call this at the same time.

    Args:
        topology: Who sits where.
        rank: This member's global rank.
        backend: For tensors of the model; control groups are always gloo (CPU tensors).
        timeout: Of every collective; torch's default if not given.
        world: The open world of the generation, where members may die: then the construction can be left, all groups
            are broken when its failure flag is set, and its own timeout is used.
        progress: Told of every collective that is entered and left.

    Raises:
        GenerationOver: with a ``world``, if a member died meanwhile.
    """
    replica, slot = topology.place(rank)
    replicas = [topology.tensor_parallel_ranks(index) for index in range(topology.num_replicas)]
    columns = [topology.data_parallel_ranks(index) for index in range(topology.sync_degree)]
    everyone, leaders = tuple(range(topology.world_size)), topology.data_parallel_ranks(0)

    def build(name: str, rank_lists: Sequence[Sequence[int]], own: int | None, kind: str) -> GroupHandle | None:
        # new_group is called by all members for all groups, in one order; otherwise they wait for each other.
        groups = [_new_group(ranks, kind, timeout, f"{name}{i}", world) for i, ranks in enumerate(rank_lists)]
        if own is None:
            return None
        handle = GroupHandle(name, progress, world and world.abort)
        handle.point_at(rank_lists[own], rank, groups[own])
        return handle

    return Channels(
        tensor_parallel=build("tensor_parallel", replicas, replica, backend),
        reshard=build("reshard", replicas, replica, backend),
        data_parallel=build("data_parallel", columns, slot if slot < topology.sync_degree else None, backend),
        control=build("control", [everyone], 0, "gloo"),
        replica_control=build("replica_control", replicas, replica, "gloo"),
        leader_control=build("leader_control", [leaders], 0 if slot == 0 else None, "gloo"),
    )


def lone_channels(topology: Topology, rank: int) -> Channels:
    """The channels of a member that acts alone: every collective is the identity."""
    slot = topology.place(rank)[1]
    return Channels(
        tensor_parallel=GroupHandle("tensor_parallel"),
        reshard=GroupHandle("reshard"),
        data_parallel=GroupHandle("data_parallel") if slot < topology.sync_degree else None,
        control=GroupHandle("control"),
        replica_control=GroupHandle("replica_control"),
        leader_control=GroupHandle("leader_control") if slot == 0 else None,
    )


def _new_group(
    ranks: Sequence[int],
    backend: str,
    timeout: datetime.timedelta | None,
    description: str,
    world: GenerationWorld | None,
) -> dist.ProcessGroup | None:
    if len(ranks) == 1:
        return None
    if world is not None:
        return world.new_group(list(ranks), backend, f"ntp_{description}")
    return dist.new_group(list(ranks), timeout=timeout, backend=backend, group_desc=f"ntp_{description}")


def world_handle(
    size: int, rank: int, progress: Progress | None = None, abort: Abort | None = None
) -> GroupHandle:
    """The default group, in which all members are: where shards move between views."""
    handle = GroupHandle("world", progress, abort)
    handle.point_at(range(size), rank, dist.group.WORLD if size > 1 else None)
    return handle
