"""Which part of a job one supervisor starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """The members that one supervisor starts, and their place among all.

    Attributes:
        ranks: Of the members that are started here.
        world_size: Members of the whole job.
        index: Number of this node; ``None`` for one that comes to a job that runs already.
        num_nodes: How many start the job.
        first_local_rank: LOCAL_RANK of the first member here: the number of its device.
        local_world_size: Members on this machine, whoever started them.
        title: What the members here are, for the reader.
        is_shim: Whether torchrun started this supervisor, one for each member: it waits for all of them, keeps the
            store, and tells the user of stops.
    """

    ranks: tuple[int, ...]
    world_size: int
    index: int | None = 0
    num_nodes: int = 1
    first_local_rank: int = 0
    local_world_size: int = 1
    title: str = "the job"
    is_shim: bool = False

    @classmethod
    def alone(cls, num_members: int) -> Node:
        """All members of the job."""
        return cls(tuple(range(num_members)), num_members, local_world_size=num_members)

    @classmethod
    def one_of(cls, num_nodes: int, index: int, num_members: int) -> Node:
        """One of several nodes that start ``num_members`` each."""
        first = index * num_members
        ranks = tuple(range(first, first + num_members))
        title = f"node {index} of the job"
        return cls(ranks, num_nodes * num_members, index, num_nodes, local_world_size=num_members, title=title)

    @classmethod
    def joining(cls, ranks: Sequence[int], world_size: int) -> Node:
        """For seats of a job that runs already."""
        return cls(tuple(ranks), world_size, None, local_world_size=len(ranks), title="the joining members")

    @classmethod
    def under_torchrun(cls, env: Mapping[str, str] = os.environ) -> Node:
        """One member: torchrun starts a supervisor for each."""
        rank, world_size, local_rank, local_world_size = (
            int(env[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
        index = int(env.get("GROUP_RANK", 0))
        return cls((rank,), world_size, index, 1, local_rank, local_world_size, f"rank {rank} of the job", True)

    def member_env(self, rank: int) -> dict[str, str]:
        """torch's names for a member's place."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(self.first_local_rank + self.ranks.index(rank)),
            "NODE_RANK": str(self.index or 0),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
        }
