"""The gradient sync carried out on whole numbers: every unit's sum is exact on every holder of every replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ntp.layout import Entry, Move, ParameterLayout, Replicated, Sharded, SyncPlan, plan_sync
from tests.unit.layout.layout_samples import blocks, fused_qkv, gate_up, key_value, plain

Gradients = list[np.ndarray]  # of one slot: for each entry its local rows, (rows, row_numel)
UNWRITTEN = -(10**9)


def local_rows(layout: ParameterLayout, degree: int, slot: int) -> int:
    return 1 if isinstance(layout, Replicated) else layout.local_extent(degree, slot)


def split_to_holders(dense: np.ndarray, entry: Entry, degree: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Local gradients of one entry whose sum over the holders of each unit is ``dense``."""
    layout = entry.layout
    local = [np.zeros((local_rows(layout, degree, slot), entry.row_numel), dense.dtype) for slot in range(degree)]
    if isinstance(layout, Replicated):
        for slot in range(degree):
            local[slot][:] = dense
        if layout.partial_grad:
            local[1:] = [rng.integers(-99, 99, dense.shape) for _ in local[1:]]
            local[0] = dense - sum(local[1:])
        return local
    rest = dense.copy()
    for slot in range(degree):
        for piece in layout.pieces(degree, slot):
            rows = slice(piece.local_row, piece.local_row + piece.rows)
            source = slice(piece.dense_row, piece.dense_row + piece.rows)
            is_last = slot == layout.segments[piece.segment].family.at(degree).holders[piece.unit][-1]
            local[slot][rows] = rest[source] if is_last else rng.integers(-99, 99, rest[source].shape)
            rest[source] -= local[slot][rows]
    assert not rest.any()
    return local


def expected_rows(dense: np.ndarray, layout: ParameterLayout, degree: int, slot: int) -> np.ndarray:
    if isinstance(layout, Replicated):
        return dense
    spans = [dense[piece.dense_row : piece.dense_row + piece.rows] for piece in layout.pieces(degree, slot)]
    return np.concatenate(spans) if spans else dense[:0]


@dataclass
class Replica:
    """One replica: its plan and the local gradients of its slots."""

    plan: SyncPlan
    gradients: list[Gradients]

    def rows(self, slot: int, move: Move) -> np.ndarray:
        """A view on what a move names in the slot's own gradient."""
        return self.gradients[slot][move.param][move.row : move.row + move.rows]

    def gather(self) -> list[np.ndarray]:
        """Before the sum: the sync buffer of every slot."""
        buffers = [np.zeros(slot.numel, np.int64) for slot in self.plan.slots]
        for number, slot in enumerate(self.plan.slots):
            for move in slot.keep:
                buffers[number][move.offset : move.offset + move.numel] += self.rows(number, move).ravel()
            for origin, moves in enumerate(slot.take):
                given = self.plan.slots[origin].give[number]
                packed = [self.rows(origin, move).ravel() for move in given]
                unpack(np.concatenate(packed) if packed else np.zeros(0, np.int64), moves, buffers[number])
        return buffers

    def scatter(self, buffers: Sequence[np.ndarray]) -> None:
        """After the sum: every holder's gradient, written over a value that no sum has."""
        for local in self.gradients:
            for rows in local:
                rows[:] = UNWRITTEN
        for number, slot in enumerate(self.plan.slots):
            for move in slot.restore:
                self.rows(number, move).flat = buffers[number][move.offset : move.offset + move.numel]
            for origin, moves in enumerate(slot.get):
                handed = self.plan.slots[origin].hand[number]
                packed = [buffers[origin][move.offset : move.offset + move.numel] for move in handed]
                message, start = np.concatenate(packed) if packed else np.zeros(0, np.int64), 0
                for move in moves:
                    self.rows(number, move).flat = message[start : start + move.numel]
                    start += move.numel
                assert start == message.size


def unpack(message: np.ndarray, moves: Sequence[Move], buffer: np.ndarray) -> None:
    start = 0
    for move in moves:
        buffer[move.offset : move.offset + move.numel] += message[start : start + move.numel]
        start += move.numel
    assert start == message.size


def simulate(entries: Sequence[Entry], degrees: Sequence[int], owner: int = 0, seed: int = 0) -> list[SyncPlan]:
    """The whole sync of one bucket in every replica, checked; returns the plans."""
    rng, sync_degree = np.random.default_rng(seed), min(degrees)
    totals = [0] * len(entries)
    replicas = []
    for degree in degrees:
        gradients: list[Gradients] = [[] for _ in range(degree)]
        for index, entry in enumerate(entries):
            dense_rows = 1 if isinstance(entry.layout, Replicated) else entry.layout.extent
            dense = rng.integers(-99, 99, (dense_rows, entry.row_numel))
            totals[index] = totals[index] + dense
            for slot, local in enumerate(split_to_holders(dense, entry, degree, rng)):
                gradients[slot].append(local)
        replicas.append(Replica(plan_sync(entries, degree, sync_degree, owner), gradients))

    gathered = [replica.gather() for replica in replicas]
    for slot in range(sync_degree):
        sizes = {buffers[slot].size for buffers in gathered}
        assert len(sizes) == 1, f"slot {slot} has buffers of {sizes} elements"
        total = sum(buffers[slot] for buffers in gathered)
        for buffers in gathered:
            buffers[slot] = total
    assert sum(buffer.size for buffer in gathered[0]) == sum(total.size for total in totals)

    for replica, buffers in zip(replicas, gathered, strict=True):
        replica.scatter(buffers)
        for slot, local in enumerate(replica.gradients):
            for entry, total, rows in zip(entries, totals, local, strict=True):
                assert np.array_equal(rows, expected_rows(total, entry.layout, replica.plan.degree, slot))
        check_traffic(replica.plan, entries)
    return [replica.plan for replica in replicas]


def check_traffic(plan: SyncPlan, entries: Sequence[Entry]) -> None:
    """Bytes and flags as the layouts alone predict them."""
    sharded = [entry for entry in entries if isinstance(entry.layout, Sharded)]
    whole = [entry for entry in entries if isinstance(entry.layout, Replicated)]
    partial = [entry for entry in whole if entry.layout.partial_grad]
    for number in range(plan.sync_degree, plan.degree):
        slot = plan.slots[number]
        own = sum(local_rows(entry.layout, plan.degree, number) * entry.row_numel for entry in sharded)
        assert slot.numel == 0 and not slot.keep and not slot.restore
        assert elements(slot.give) == own + sum(entry.row_numel for entry in partial)
        assert elements(slot.get) == own + sum(entry.row_numel for entry in whole)
        assert not elements(slot.take) and not elements(slot.hand)
    away, several = _units_away(plan, sharded), plan.degree > 1
    assert plan.has_pre == (away or (several and bool(partial)))
    assert plan.has_post == (away or (several and bool(whole)))
    assert plan.is_trivial == (not plan.has_pre and not plan.has_post)


def elements(by_slot: Sequence[Sequence[Move]]) -> int:
    return sum(move.numel for moves in by_slot for move in moves)


def _units_away(plan: SyncPlan, sharded: Sequence[Entry]) -> bool:
    """Whether some unit is held, at the replica's degree, by a slot other than its owner at the sync degree."""
    return any(
        holders != (owner,)
        for entry in sharded
        for segment in entry.layout.segments
        for holders, owner in zip(
            segment.family.at(plan.degree).holders, segment.family.at(plan.sync_degree).owners, strict=True
        )
    )


def mixed_entries(nominal: int) -> list[Entry]:
    """A parameter of every kind in one bucket (dim 1 travels with the sharded dimension first)."""
    return [
        Entry(plain(8, nominal, rows=2), 3),
        Entry(Replicated(), 5),
        Entry(fused_qkv(8, 2, nominal), 4),
        Entry(blocks(13, 4, nominal, dim=1), 2),
        Entry(Replicated(partial_grad=True), 4),
        Entry(key_value(6, 3, nominal), 1),
        Entry(gate_up(10, 2, nominal, dim=1), 3),
    ]


DEGREES = [(1,), (4,), (1, 1), (2, 2), (4, 4), (4, 3), (3, 4), (4, 2), (4, 3, 2), (3, 1), (8, 7), (8, 5, 7, 8)]


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_every_sum_is_exact_on_every_holder(degrees):
    simulate(mixed_entries(max(degrees)), degrees)


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_any_core_slot_may_own_the_replicated_parameters(owner):
    simulate(mixed_entries(4), (4, 3), owner=owner)


def test_64_query_8_kv_heads_at_8_and_7():
    simulate([Entry(fused_qkv(64, 8, 8), 6), Entry(plain(64, 8, rows=2, dim=1), 5)], (8, 7))


@st.composite
def layouts(draw, nominal: int) -> ParameterLayout:
    dim, heads = draw(st.integers(0, 1)), draw(st.integers(1, 12))
    kv_heads = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    extent, block = draw(st.integers(1, 40)), draw(st.integers(1, 8))
    return draw(
        st.sampled_from(
            [
                plain(heads, nominal, 2, dim),
                blocks(extent, block, nominal, dim),
                gate_up(extent, block, nominal, dim),
                key_value(heads, kv_heads, nominal, 2, dim),
                fused_qkv(heads, kv_heads, nominal, 2, dim),
                Replicated(),
                Replicated(partial_grad=True),
            ]
        )
    )


@settings(max_examples=150)
@given(st.data(), st.integers(1, 8), st.integers(0, 2**16))
def test_any_bucket_at_any_degrees(data, nominal, seed):
    entries = data.draw(st.lists(st.builds(Entry, layouts(nominal), st.integers(1, 4)), min_size=1, max_size=5))
    degrees = data.draw(st.lists(st.integers(1, nominal), min_size=1, max_size=4))
    simulate(entries, degrees, owner=data.draw(st.integers(0, min(degrees) - 1)), seed=seed)


@pytest.mark.parametrize(
    ("layout", "degree", "sync_degree", "trivial"),
    [
        (plain(8, 4), 4, 4, True),
        (gate_up(10, 2, 4, dim=1), 3, 3, True),
        (plain(8, 4), 4, 3, False),
        (plain(8, 4), 3, 3, True),  # the replica at the sync degree, whatever the others do
        (plain(2, 4), 4, 3, True),  # slot 3 is empty: nobody lacks a unit
        (key_value(8, 4, 4), 4, 4, True),  # each KV head has one holder
        (key_value(8, 2, 4), 4, 4, False),  # fewer KV heads than slots: their gradients are partial
        (fused_qkv(8, 4, 4), 3, 3, False),
        (fused_qkv(8, 4, 4), 1, 1, True),
        (Replicated(), 2, 2, False),  # one owner reduces and hands out
        (Replicated(), 1, 1, True),
        (Replicated(partial_grad=True), 1, 1, True),
    ],
)
def test_is_trivial(layout, degree, sync_degree, trivial):
    assert plan_sync([Entry(layout, 3)], degree, sync_degree).is_trivial is trivial


def test_no_travel_before_the_sum_of_equal_gradients():
    plan = plan_sync([Entry(Replicated(), 3)], 4, 3)
    assert not plan.has_pre and plan.has_post


@pytest.mark.parametrize("layout", [plain(10, 4, rows=2), gate_up(10, 2, 4), fused_qkv(8, 4, 4)])
def test_a_trivial_plan_sums_in_place(layout):
    """One run per parameter, in order: the buffer is the slot's gradients one after the other."""
    entries = [Entry(layout, 3), Entry(plain(6, 4), 2)]
    plan = plan_sync(entries, 4, 4)
    assert plan.is_trivial
    for number, slot in enumerate(plan.slots):
        rows = [local_rows(entry.layout, 4, number) for entry in entries]
        assert slot.keep == slot.restore
        assert slot.keep == (
            Move(0, 0, rows[0], 0, rows[0] * 3),
            Move(1, 0, rows[1], rows[0] * 3, rows[1] * 2),
        )


def test_one_move_by_hand():
    """8 units of 2 rows, 4 -> 3: slot 3 gives unit 6 to slot 0 and unit 7 to slot 1, behind what these own."""
    plan = plan_sync([Entry(plain(8, 4, rows=2), 5)], 4, 3)
    assert plan.slots[3].give == ((Move(0, 0, 2, 20, 10),), (Move(0, 2, 2, 20, 10),), (), ())
    assert plan.slots[3].get == plan.slots[3].give
    assert plan.slots[0].take == plan.slots[0].hand == ((), (), (), (Move(0, 0, 2, 20, 10),))
    assert [slot.numel for slot in plan.slots] == [30, 30, 20, 0]


def test_the_sum_is_made_where_most_query_heads_are():
    """10 query, 2 KV heads at 4: KV head 1 serves 1, 2, 2 heads of slots 1, 2, 3; slot 2 owns its 2 rows of 3."""
    plan = plan_sync([Entry(key_value(10, 2, 4), 3)], 4, 4)
    assert [slot.numel for slot in plan.slots] == [6, 0, 6, 0]
    assert [elements(slot.give) for slot in plan.slots] == [0, 12, 0, 6]


def test_the_buffer_does_not_depend_on_the_replicas_degree():
    entries = mixed_entries(6)
    sizes = {tuple(slot.numel for slot in plan_sync(entries, degree, 3).slots[:3]) for degree in (3, 4, 5, 6)}
    assert len(sizes) == 1
    simulate(entries, (3, 4, 5, 6))
