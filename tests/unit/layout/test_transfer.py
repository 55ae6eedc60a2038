"""Transfers between views: only what is missing, from the nearest source, and the tensor is whole again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.layout import Holder, Sharded, Slice, Transfer, plan_transfer
from tests.unit.layout.layout_samples import (
    blocks,
    fused_qkv,
    gate_up,
    key_value,
    local_part,
    numbered,
    plain,
    rows_first,
)

Parts = dict[int, np.ndarray]


def replica_of(degree: int, replica: int = 0) -> list[Holder]:
    """A replica whose slots are filled by members 100 * replica + slot."""
    return [Holder(100 * replica + slot, replica, degree, slot) for slot in range(degree)]


def lose(replica: Sequence[Holder], *dead_slots: int) -> list[Holder]:
    """The replica without these slots: survivors in slots >= m fill the dead slots in ascending order."""
    degree = len(replica) - len(dead_slots)
    survivors = [holder for holder in replica if holder.slot not in dead_slots]
    dead = iter(sorted(dead_slots))
    slots = [holder.slot if holder.slot < degree else next(dead) for holder in survivors]
    return [Holder(old.member, old.replica, degree, slot) for old, slot in zip(survivors, slots, strict=True)]


def parts_of(layout: Sharded, holders: Sequence[Holder]) -> Parts:
    dense = numbered(layout)
    return {holder.member: local_part(dense, layout, holder.degree, holder.slot) for holder in holders}


def carry_out(transfer: Transfer, layout: Sharded, old: Parts, after: Sequence[Holder]) -> Parts:
    """Move real rows; what is never written stays NaN."""
    new, across = {}, next(iter(old.values())).shape[1 - layout.dim]
    for holder in after:
        shape = [across, across]
        shape[layout.dim] = layout.local_extent(holder.degree, holder.slot)
        new[holder.member] = np.full(shape, np.nan)
        target = rows_first(new[holder.member], layout)
        for old_row, new_row, rows in transfer.kept[holder.member]:
            source = rows_first(old[holder.member], layout)
            target[new_row : new_row + rows] = source[old_row : old_row + rows]
    for piece in transfer.slices:
        source, target = (rows_first(parts, layout) for parts in (old[piece.source], new[piece.target]))
        target[piece.target_row : piece.target_row + piece.rows] = source[
            piece.source_row : piece.source_row + piece.rows
        ]
    return new


def units_of(layout: Sharded, holder: Holder) -> dict[tuple[int, int], int]:
    return {(piece.segment, piece.unit): piece.rows for piece in layout.pieces(holder.degree, holder.slot)}


def check_minimal(transfer: Transfer, layout: Sharded, before: Sequence[Holder], after: Sequence[Holder]) -> None:
    """Each member receives the rows of wanted minus held, and keeps the rest."""
    held = {holder.member: units_of(layout, holder) for holder in before}
    received, lost = Counter(), {start for start, _ in transfer.lost}
    for piece in transfer.slices:
        assert piece.source != piece.target and piece.rows > 0
        received[piece.target] += piece.rows
    for holder in after:
        own = held.get(holder.member, {})
        wanted = layout.pieces(holder.degree, holder.slot)
        missing = [piece for piece in wanted if (piece.segment, piece.unit) not in own]
        assert received[holder.member] == sum(piece.rows for piece in missing if piece.dense_row not in lost)
        kept = sum(rows for _, _, rows in transfer.kept[holder.member])
        assert kept == sum(piece.rows for piece in wanted) - sum(piece.rows for piece in missing)


def check_move(layout: Sharded, before: Sequence[Holder], after: Sequence[Holder]) -> Transfer:
    """Plan, check for minimal bytes, carry out, compare with the parts cut from the dense tensor."""
    transfer = plan_transfer(layout, before, after)
    check_minimal(transfer, layout, before, after)
    moved = carry_out(transfer, layout, parts_of(layout, before), after)
    for member, expected in parts_of(layout, after).items():
        assert np.array_equal(moved[member], expected)
    assert transfer.lost == ()
    return transfer


def check_adjacent(layout: Sharded, degree: int) -> None:
    """From ``degree`` one down and back: up, the last slot's rows move; down too, unless KV heads are shared."""
    wide, narrow = replica_of(degree), replica_of(degree - 1)
    down, up = check_move(layout, wide, narrow), check_move(layout, narrow, wide)
    last = layout.local_extent(degree, degree - 1)
    assert up.moved_rows == last and {piece.target for piece in up.slices} <= {degree - 1}
    if not layout.is_shared(degree) and not layout.is_shared(degree - 1):
        assert down.moved_rows == last and {piece.source for piece in down.slices} <= {degree - 1}


@pytest.mark.parametrize("num_units", [1, 2, 5, 8, 13, 33, 64])
@pytest.mark.parametrize("dim", [0, 1])
def test_adjacent_degrees(num_units, dim):
    for nominal in (2, 3, 4, 8):
        for degree in range(2, nominal + 1):
            check_adjacent(plain(num_units, nominal, rows=2, dim=dim), degree)


@pytest.mark.exhaustive
@pytest.mark.parametrize("nominals", [range(2, 41), range(41, 61), range(61, 73)], ids=["2-40", "41-60", "61-72"])
def test_adjacent_degrees_everywhere(nominals):
    for num_units in range(1, 65):
        for nominal in nominals:
            layout = plain(num_units, nominal, dim=num_units % 2)
            for degree in range(2, nominal + 1):
                check_adjacent(layout, degree)


SAMPLES = {
    "short last block": blocks(101, 8, 4),
    "columns": blocks(44, 4, 4, dim=1),
    "gate-up": gate_up(22, 4, 4),
    "gate-up columns": gate_up(22, 4, 4, dim=1),
    "kv": key_value(8, 2, 4),
    "fused qkv": fused_qkv(6, 3, 4),
    "fused qkv columns": fused_qkv(6, 3, 4, dim=1),
}


@pytest.fixture(params=SAMPLES.values(), ids=SAMPLES.keys())
def layout(request) -> Sharded:
    return request.param


def test_any_two_degrees_and_back(layout):
    for start in range(1, 5):
        for end in range(1, 5):
            check_move(layout, replica_of(start), replica_of(end))


def test_adjacent_degrees_of_fused_and_strided_layouts(layout):
    for degree in range(2, 5):
        check_adjacent(layout, degree)


@st.composite
def layouts(draw, nominal: int) -> Sharded:
    dim, heads = draw(st.integers(0, 1)), draw(st.integers(1, 12))
    kv_heads = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    extent, block = draw(st.integers(1, 60)), draw(st.integers(1, 8))
    return draw(
        st.sampled_from(
            [
                plain(heads, nominal, 2, dim),
                blocks(extent, block, nominal, dim),
                gate_up(extent, block, nominal, dim),
                key_value(heads, kv_heads, nominal, 2, dim),
                fused_qkv(heads, kv_heads, nominal, 2, dim),
            ]
        )
    )


@given(st.data(), st.integers(1, 9))
def test_failures_at_any_seats_and_their_return(data, nominal):
    """One replica loses any slots, a whole one beside it: it shrinks, then the lost members join with nothing."""
    layout = data.draw(layouts(nominal))
    dead = data.draw(st.sets(st.integers(0, nominal - 1), max_size=nominal - 1))
    whole, hit = replica_of(nominal, 0), replica_of(nominal, 1)
    shrunk = lose(hit, *dead)
    live = [holder for holder in hit if holder.slot not in dead]
    check_move(layout, [*whole, *live], [*whole, *shrunk])
    grown = [Holder(old.member, 1, nominal, old.slot) for old in shrunk]
    joiners = [Holder(900 + slot, 1, nominal, slot) for slot in range(len(shrunk), nominal)]
    check_move(layout, [*whole, *shrunk], [*whole, *grown, *joiners])


@given(st.data(), st.integers(1, 9))
def test_failures_in_every_replica(data, nominal):
    """What no live member holds is reported as lost, all else arrives."""
    layout = data.draw(layouts(nominal))
    before, after = [], []
    for replica in range(data.draw(st.integers(1, 3))):
        full = replica_of(nominal, replica)
        dead = data.draw(st.sets(st.integers(0, nominal - 1), max_size=nominal - 1))
        before += [holder for holder in full if holder.slot not in dead]
        after += lose(full, *dead)
    transfer = plan_transfer(layout, before, after)
    check_minimal(transfer, layout, before, after)
    moved = carry_out(transfer, layout, parts_of(layout, before), after)
    live = {key for holder in before for key in units_of(layout, holder)}
    for holder in after:
        got = rows_first(moved[holder.member], layout)
        expected = rows_first(parts_of(layout, [holder])[holder.member], layout)
        for piece in layout.pieces(holder.degree, holder.slot):
            rows = slice(piece.local_row, piece.local_row + piece.rows)
            if (piece.segment, piece.unit) in live:
                assert np.array_equal(got[rows], expected[rows])
            else:
                assert np.isnan(got[rows]).all() and (piece.dense_row, piece.rows) in transfer.lost
    wanted = {piece for holder in after for piece in layout.pieces(holder.degree, holder.slot)}
    gone = {(piece.dense_row, piece.rows) for piece in wanted if (piece.segment, piece.unit) not in live}
    assert set(transfer.lost) == gone and list(transfer.lost) == sorted(gone)


def test_survivors_fill_the_dead_slots():
    """8 units at degree 4, slot 1 dies: slot 3's member takes slot 1; its rows come from the peer, all else from it."""
    layout = plain(8, 4)
    whole, hit = replica_of(4, 0), replica_of(4, 1)
    shrunk = lose(hit, 1)
    assert [(holder.member, holder.slot) for holder in shrunk] == [(100, 0), (102, 2), (103, 1)]
    live = [holder for holder in hit if holder.slot != 1]
    transfer = check_move(layout, [*whole, *live], [*whole, *shrunk])
    assert transfer.slices == (
        Slice(source=103, target=100, source_row=0, target_row=2, rows=1),
        Slice(source=1, target=103, source_row=0, target_row=0, rows=2),
    )
    assert transfer.kept[103] == ((1, 2, 1),)


def test_two_dead_slots_are_filled_in_ascending_order():
    shrunk = lose(replica_of(5), 0, 2)
    assert [(holder.member, holder.slot) for holder in shrunk] == [(1, 1), (3, 0), (4, 2)]


def test_own_replica_is_the_source_where_it_holds_a_unit():
    """Both replicas hold every unit; nothing leaves a replica that can help itself."""
    layout = plain(13, 4)
    before = [*replica_of(4, 0), *replica_of(4, 1)]
    after = [*replica_of(3, 0), *replica_of(4, 1)]
    transfer = check_move(layout, before, after)
    assert {piece.source for piece in transfer.slices} == {3}


def test_sources_are_spread_over_the_peers():
    """A whole replica joins with nothing, beside two peers that hold every unit twice."""
    layout = plain(64, 8)
    peers = [*replica_of(8, 0), *replica_of(8, 1)]
    joiners = replica_of(8, 2)
    transfer = check_move(layout, peers, [*peers, *joiners])
    sent = Counter()
    for piece in transfer.slices:
        sent[piece.source] += piece.rows
    assert sent == {holder.member: 4 for holder in peers}


def test_a_drained_member_is_a_source_but_no_target():
    layout = plain(8, 4)
    transfer = plan_transfer(layout, replica_of(4), replica_of(3))
    assert set(transfer.kept) == {0, 1, 2}
    assert transfer.lost == ()


def test_the_last_holder_gone_is_lost():
    layout = plain(8, 4, rows=3)
    transfer = plan_transfer(layout, replica_of(4)[:3], replica_of(3))
    assert transfer.lost == ((18, 3), (21, 3))
    assert transfer.slices == ()


def test_nothing_changes_nothing_moves(layout):
    transfer = check_move(layout, replica_of(3), replica_of(3))
    assert transfer.slices == () and transfer.moved_rows == 0
    assert all(kept == ((0, 0, layout.local_extent(3, slot)),) for slot, kept in transfer.kept.items())


def test_neighbouring_units_travel_as_one_slice():
    """Growing 1 -> 2 at nominal 2: the joiner's 4 units lay side by side."""
    transfer = plan_transfer(plain(8, 2, rows=5), replica_of(1), replica_of(2))
    assert transfer.slices == (Slice(source=0, target=1, source_row=20, target_row=0, rows=20),)


def test_slices_never_touch(layout):
    """Two slices that could be one are one."""
    for degree in range(2, 5):
        slices = plan_transfer(layout, replica_of(degree), replica_of(degree - 1)).slices
        for a, b in pairwise(slices):
            same = (a.source, a.target) == (b.source, b.target)
            assert not (same and a.source_row + a.rows == b.source_row and a.target_row + a.rows == b.target_row)
