"""Who is where: replicas, their degrees and slots, and the groups that follow from them.

A topology is the part of a view that says which member sits in which slot. Groups are lists of ranks; nothing here
opens a channel. Seats (``r1.s3``) are physical and never change; slots are positions in a replica's live TP group.

Pure: no torch, no processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_ntp.errors import ConfigError


@dataclass(frozen=True, order=True)
class Seat:
    """Physical place of a member: seat ``index`` of ``replica``."""

    replica: int
    index: int

    def __str__(self) -> str:
        return f"r{self.replica}.s{self.index}"


@dataclass(frozen=True)
class Topology:
    """Live members by replica and slot.

    Attributes:
        nominal_degree: Degree of a replica in which nothing has failed.
        seats: For each replica the seats of its members, in slot order.
        leader_seat: Who has the rank-zero duties; by default the lowest seat.
        speaker_seats: For each replica who knows all that it has logged; by default who is in slot 0.

    Raises:
        ConfigError: if there is no replica, or a degree is outside 1..nominal_degree.
    """

    nominal_degree: int
    seats: tuple[tuple[Seat, ...], ...]
    leader_seat: Seat | None = None
    speaker_seats: tuple[Seat, ...] = ()

    def __post_init__(self) -> None:
        _check_degrees(self.degrees, self.nominal_degree)

    @classmethod
    def start(cls, degrees: Sequence[int], nominal_degree: int | None = None) -> Topology:
        """The first topology of a job: replica r has seats 0..degrees[r]-1, in slot order."""
        nominal = max(degrees, default=0) if nominal_degree is None else nominal_degree
        _check_degrees(degrees, nominal)
        seats = tuple(tuple(Seat(replica, index) for index in range(n)) for replica, n in enumerate(degrees))
        return cls(nominal, seats)

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(len(replica) for replica in self.seats)

    @property
    def num_replicas(self) -> int:
        return len(self.seats)

    @property
    def world_size(self) -> int:
        return sum(self.degrees)

    @property
    def sync_degree(self) -> int:
        """The lowest live degree: units are summed over the replicas in its layout."""
        return min(self.degrees)

    @property
    def is_uniform(self) -> bool:
        return len(set(self.degrees)) == 1

    @cached_property
    def members(self) -> tuple[Seat, ...]:
        """Seats in rank order: replica by replica, slot by slot."""
        return tuple(seat for replica in self.seats for seat in replica)

    def rank(self, replica: int, slot: int) -> int:
        return sum(self.degrees[:replica]) + slot

    def place(self, rank: int) -> tuple[int, int]:
        """(replica, slot) of a rank."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is outside the {self.world_size} members of degrees {list(self.degrees)}")
        replica = 0
        while rank >= self.degrees[replica]:
            rank -= self.degrees[replica]
            replica += 1
        return replica, rank

    def tensor_parallel_ranks(self, replica: int) -> tuple[int, ...]:
        """Ranks of a replica, in slot order."""
        first = self.rank(replica, 0)
        return tuple(range(first, first + self.degrees[replica]))

    def data_parallel_ranks(self, slot: int) -> tuple[int, ...]:
        """Ranks that sum the gradients of sync slot ``slot``: that slot of every replica."""
        if not 0 <= slot < self.sync_degree:
            raise ConfigError(f"slot {slot} takes no part in the sum: the sync degree is {self.sync_degree}")
        return tuple(self.rank(replica, slot) for replica in range(self.num_replicas))

    @property
    def leader(self) -> int:
        """Rank of the member with the rank-zero duties."""
        return self.members.index(min(self.members) if self.leader_seat is None else self.leader_seat)

    def speaker(self, replica: int) -> int:
        """Rank of the member that tells what a replica has logged: a joiner, even in slot 0, knows only part of it."""
        return self.members.index(self.speaker_seats[replica]) if self.speaker_seats else self.rank(replica, 0)

    def leader_first(self, rank: int) -> int:
        """The rank that a library knows which takes rank 0 for the leader: the two are exchanged. Its own inverse."""
        return {self.leader: 0, 0: self.leader}.get(rank, rank)


def _check_degrees(degrees: Sequence[int], nominal_degree: int) -> None:
    if not degrees:
        raise ConfigError("degrees=[]: a job needs at least one replica, e.g. degrees=[4, 3]")
    wrong = [degree for degree in degrees if not 1 <= degree <= nominal_degree]
    if wrong:
        raise ConfigError(
            f"degrees={list(degrees)}: {wrong[0]} is outside 1..{nominal_degree}; a replica has at least one member "
            f"and at most tensor_parallel_size={nominal_degree}"
        )
