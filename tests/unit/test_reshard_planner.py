"""Which rows go from whom to whom between two views: everybody gets the whole of its part, from those that have it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.layout import LayoutFamily, Replicated, Segment, Sharded
from lightning_ntp.parallel.shards import take_local
from lightning_ntp.reshard import PeerState, Place
from lightning_ntp.reshard.planner import ParameterMove, Planner

NOMINAL, UNITS = 4, 11
LAYOUT = Sharded(0, (Segment(LayoutFamily(UNITS, NOMINAL), (2,) * UNITS), Segment(LayoutFamily(3, NOMINAL), (1,) * 3)))

places = st.integers(1, NOMINAL).flatmap(
    lambda degree: st.builds(Place, st.integers(0, 2), st.just(degree), st.integers(0, degree - 1))
)


def replica(number: int, degree: int) -> list[Place]:
    return [Place(number, degree, slot) for slot in range(degree)]


def part(place: Place) -> torch.Tensor:
    """The numbers of the dense rows that a place has."""
    return take_local(torch.arange(LAYOUT.extent), LAYOUT, place.degree, place.slot)


def carry_out(move: ParameterMove, peers: list[PeerState]) -> dict[int, torch.Tensor]:
    """Each member's new part."""
    new = {}
    for rank, peer in enumerate(peers):
        if peer.target is not None:
            new[rank] = torch.full((LAYOUT.local_extent(peer.target.degree, peer.target.slot),), -1)
            for old_row, new_row, rows in move.kept.get(rank, ()):
                new[rank][new_row : new_row + rows] = part(peer.held[0][0])[old_row : old_row + rows]
    for leg in move.legs:
        rows = part(peers[leg.source].held[0][leg.holding])[leg.source_row : leg.source_row + leg.rows]
        new[leg.target][leg.target_row : leg.target_row + leg.rows] = rows
    return new


@given(
    st.lists(st.lists(places, max_size=3), min_size=1, max_size=6),
    st.lists(st.integers(1, NOMINAL), min_size=1, max_size=3),
    st.integers(0, 5),
)
def test_everybody_gets_its_part_or_it_is_said_to_be_lost(held, degrees, index):
    targets = [place for number, degree in enumerate(degrees) for place in replica(number, degree)]
    held += [[]] * (len(targets) - len(held))
    peers = [
        PeerState((tuple(mine),) * 6 if mine else (), targets[rank] if rank < len(targets) else None)
        for rank, mine in enumerate(held)
    ]
    move = Planner(peers).move(LAYOUT, index)
    there = {row for mine in held for place in mine for row in part(place).tolist()}
    assert move.is_lost == (there != set(range(LAYOUT.extent)))
    if not move.is_lost:
        for rank, rows in carry_out(move, peers).items():
            assert torch.equal(rows, part(peers[rank].target)), rank


def test_all_others_give_a_returning_replica_about_the_same():
    targets = [place for number in range(6) for place in replica(number, 4)]
    peers = [PeerState(((place,),) * 80 if place.replica != 2 else (), place) for place in targets]
    sent = dict.fromkeys(range(6), 0)
    planner = Planner(peers)
    for index in range(80):
        for leg in planner.move((LAYOUT, Replicated())[index % 2], index).legs:
            assert peers[leg.target].replica == 2
            sent[peers[leg.source].replica] += leg.rows
    assert sent.pop(2) == 0
    assert max(sent.values()) <= 1.2 * min(sent.values()), sent


def test_what_a_member_has_comes_from_nowhere_else():
    peers = [PeerState(((place,),), place) for number in range(2) for place in replica(number, 3)]
    peers += [PeerState(((Place(2, 2, 0),),), None)]
    move = Planner(peers).move(LAYOUT, 0)
    assert not move.legs and not move.is_lost and Planner(peers).num_replicas == 2
