"""Pieces of local tensors: where each unit lies, in the dense tensor and in the slot's."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_ntp.errors import LayoutError
from lightning_ntp.layout import LayoutFamily, Piece, Replicated, Segment, Sharded, merge_rows
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

SAMPLES = {
    "plain": plain(10, 4, rows=3),
    "fewer units than slots": plain(2, 4),
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


def test_local_parts_cover_the_dense_tensor(layout):
    dense = numbered(layout)
    for degree in range(1, 5):
        parts = [local_part(dense, layout, degree, slot) for slot in range(degree)]
        values = np.concatenate([part.ravel() for part in parts])
        assert set(values) == set(dense.ravel())
        assert layout.is_shared(degree) == (values.size > dense.size)


def test_pieces_lie_one_after_the_other(layout):
    for degree in range(1, 5):
        for slot in range(degree):
            ends = 0
            for piece in layout.pieces(degree, slot):
                assert piece.local_row == ends
                assert piece.rows == layout.segments[piece.segment].sizes[piece.unit]
                ends += piece.rows
            assert ends == layout.local_extent(degree, slot)


def test_arrivals_go_to_the_end_of_their_segment(layout):
    """The prefix property per segment: what a slot held stays in place, up to the shift of whole segments."""
    for degree in range(2, 5):
        for slot in range(degree - 1):
            for segment in range(len(layout.segments)):
                wide, narrow = (
                    [piece.unit for piece in layout.pieces(n, slot) if piece.segment == segment]
                    for n in (degree, degree - 1)
                )
                assert narrow[: len(wide)] == wide


def test_merged_rows_give_the_same_part(layout):
    dense = numbered(layout)
    for degree in range(1, 5):
        for slot in range(degree):
            runs = merge_rows(layout.pieces(degree, slot))
            source = rows_first(dense, layout)
            spans = [source[start : start + rows] for start, _, rows in runs]
            part = rows_first(local_part(dense, layout, degree, slot), layout)
            assert np.array_equal(np.concatenate(spans) if spans else part, part)
            assert all(a[0] + a[2] != b[0] for a, b in zip(runs, runs[1:], strict=False)), "neighbours not joined"


def test_fused_qkv_by_hand():
    """6 query, 3 KV heads of one row at degree 2: slot 0 has queries 0, 1 and 4, and KV heads 0 and 2."""
    pieces = fused_qkv(6, 3, 4, head_dim=1).pieces(2, 0)
    assert pieces == (
        Piece(0, 0, 0, 0, 1),
        Piece(0, 1, 1, 1, 1),
        Piece(0, 4, 4, 2, 1),
        Piece(1, 0, 6, 3, 1),
        Piece(1, 2, 8, 4, 1),
        Piece(2, 0, 9, 5, 1),
        Piece(2, 2, 11, 6, 1),
    )
    assert merge_rows(pieces) == ((0, 0, 2), (4, 2, 1), (6, 3, 1), (8, 4, 2), (11, 6, 1))


def test_nominal_layout_of_one_segment_is_one_run():
    assert merge_rows(plain(10, 4, rows=3).pieces(4, 1)) == ((9, 0, 9),)


def test_extents():
    layout = gate_up(22, 4, 4)
    assert layout.extent == 44
    assert [layout.local_extent(4, slot) for slot in range(4)] == [16, 16, 8, 4]
    assert [segment.starts for segment in layout.segments] == [(0, 4, 8, 12, 16, 20)] * 2


def test_sizes_must_match_the_family():
    with pytest.raises(LayoutError, match="3 unit sizes for a family of 4 units"):
        Segment(LayoutFamily(4, 2), (1, 1, 1))


def test_replicated_gradients_are_equal_unless_said_otherwise():
    assert not Replicated().partial_grad
