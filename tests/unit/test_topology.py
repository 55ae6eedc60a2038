"""Topology: ranks, slots and groups of any list of degrees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.errors import ConfigError
from lightning_ntp.topology import Seat, Topology

DEGREES = [[1], [4], [2, 2], [4, 3], [3, 4], [4, 3, 2], [8, 7], [3, 1]]


def test_two_replicas_of_4_and_3():
    topology = Topology.start([4, 3])
    assert topology.nominal_degree == 4
    assert (topology.num_replicas, topology.world_size, topology.sync_degree) == (2, 7, 3)
    assert not topology.is_uniform
    assert topology.tensor_parallel_ranks(0) == (0, 1, 2, 3)
    assert topology.tensor_parallel_ranks(1) == (4, 5, 6)
    assert [topology.data_parallel_ranks(slot) for slot in range(3)] == [(0, 4), (1, 5), (2, 6)]
    assert [str(seat) for seat in topology.members[3:5]] == ["r0.s3", "r1.s0"]
    assert topology.place(5) == (1, 1)
    assert topology.leader == 0


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_ranks_places_and_groups_agree(degrees):
    topology = Topology.start(degrees)
    world = range(topology.world_size)
    assert topology.degrees == tuple(degrees)
    assert [topology.rank(*topology.place(rank)) for rank in world] == list(world)
    by_replica = [topology.tensor_parallel_ranks(replica) for replica in range(topology.num_replicas)]
    assert [rank for ranks in by_replica for rank in ranks] == list(world)
    by_slot = [rank for slot in range(topology.sync_degree) for rank in topology.data_parallel_ranks(slot)]
    core = [rank for rank in world if topology.place(rank)[1] < topology.sync_degree]
    assert sorted(by_slot) == core
    assert topology.is_uniform == (len(set(degrees)) == 1)


@given(st.lists(st.integers(1, 72), min_size=1, max_size=40))
def test_any_degrees(degrees):
    topology = Topology.start(degrees)
    assert topology.world_size == len(topology.members) == len(set(topology.members)) == sum(degrees)
    for replica, degree in enumerate(degrees):
        ranks = topology.tensor_parallel_ranks(replica)
        assert [topology.place(rank) for rank in ranks] == [(replica, slot) for slot in range(degree)]
    assert topology.sync_degree == min(degrees)


def test_nominal_degree_above_all_live_degrees():
    topology = Topology.start([3, 3], nominal_degree=4)
    assert topology.nominal_degree == 4 and topology.is_uniform


def test_slots_need_not_be_seats():
    """r1 lost seat 1: the member of seat 3 fills slot 1, ranks follow the slots."""
    first = Topology.start([4, 4])
    hit = Topology(4, (first.seats[0], (Seat(1, 0), Seat(1, 3), Seat(1, 2))))
    assert hit.members[5] == Seat(1, 3)
    assert hit.place(5) == (1, 1)
    assert hit.data_parallel_ranks(1) == (1, 5)


def test_leader_is_the_lowest_seat_not_the_lowest_slot():
    topology = Topology(4, ((Seat(0, 3), Seat(0, 1), Seat(0, 2)), (Seat(1, 0),)))
    assert topology.leader == 1
    assert topology.members[topology.leader] == Seat(0, 1)


def test_seats_sort_by_replica_then_index():
    assert sorted([Seat(1, 0), Seat(0, 11), Seat(0, 2)]) == [Seat(0, 2), Seat(0, 11), Seat(1, 0)]


@pytest.mark.parametrize(
    ("degrees", "nominal", "text"),
    [
        ([], None, r"degrees=\[\]: .*at least one replica"),
        ([4, 0], 4, r"degrees=\[4, 0\]: 0 is outside 1\.\.4"),
        ([4, -1], None, r"-1 is outside 1\.\.4"),
        ([4, 5], 4, r"degrees=\[4, 5\]: 5 is outside 1\.\.4.*tensor_parallel_size=4"),
    ],
)
def test_degrees_that_cannot_work(degrees, nominal, text):
    with pytest.raises(ConfigError, match=text):
        Topology.start(degrees, nominal)


def test_a_replica_without_members_is_refused():
    with pytest.raises(ConfigError, match=r"0 is outside 1\.\.4"):
        Topology(4, ((Seat(0, 0),), ()))


@pytest.mark.parametrize("slot", [-1, 3])
def test_only_core_slots_take_part_in_the_sum(slot):
    with pytest.raises(ConfigError, match=f"slot {slot} takes no part in the sum: the sync degree is 3"):
        Topology.start([4, 3]).data_parallel_ranks(slot)


@pytest.mark.parametrize("rank", [-1, 7])
def test_a_rank_outside_the_world_has_no_place(rank):
    with pytest.raises(ConfigError, match=rf"rank {rank} is outside the 7 members of degrees \[4, 3\]"):
        Topology.start([4, 3]).place(rank)
