"""Sample parameters for the layout tests, and the cutting of a dense array into the local parts of the slots."""

from __future__ import annotations

import numpy as np

from lightning_ntp.layout import GroupedFamily, LayoutFamily, Segment, Sharded, block_units, even_units


def plain(num_units: int, nominal: int, rows: int = 1, dim: int = 0) -> Sharded:
    """``num_units`` units of ``rows`` rows each."""
    return Sharded(dim, (Segment(LayoutFamily(num_units, nominal), (rows,) * num_units),))


def blocks(extent: int, block: int, nominal: int, dim: int = 0) -> Sharded:
    """FFN columns or vocabulary rows in blocks, of which the last may be short."""
    sizes = block_units(extent, block)
    return Sharded(dim, (Segment(LayoutFamily(len(sizes), nominal), sizes),))


def gate_up(extent: int, block: int, nominal: int, dim: int = 0) -> Sharded:
    """[gate | up], both dealt by one unit map."""
    return Sharded(dim, blocks(extent, block, nominal).segments * 2)


def key_value(num_heads: int, num_kv_heads: int, nominal: int, head_dim: int = 2, dim: int = 0) -> Sharded:
    family = GroupedFamily(num_heads, num_kv_heads, nominal)
    return Sharded(dim, (Segment(family, even_units(num_kv_heads * head_dim, num_kv_heads)),))


def fused_qkv(num_heads: int, num_kv_heads: int, nominal: int, head_dim: int = 2, dim: int = 0) -> Sharded:
    """[q | k | v] of grouped-query attention."""
    (query,) = plain(num_heads, nominal, head_dim).segments
    (kv,) = key_value(num_heads, num_kv_heads, nominal, head_dim).segments
    return Sharded(dim, (query, kv, kv))


def numbered(layout: Sharded, across: int = 3) -> np.ndarray:
    """A dense array of two dimensions in which every element is different."""
    shape = (layout.extent, across) if layout.dim == 0 else (across, layout.extent)
    return np.arange(1.0, 1.0 + layout.extent * across).reshape(shape)


def local_part(dense: np.ndarray, layout: Sharded, degree: int, slot: int) -> np.ndarray:
    """What ``slot`` holds of ``dense``, row by row of its pieces; every local row is filled exactly once."""
    shape = list(dense.shape)
    shape[layout.dim] = layout.local_extent(degree, slot)
    local = np.full(shape, np.nan)
    source, target = rows_first(dense, layout), rows_first(local, layout)
    for piece in layout.pieces(degree, slot):
        span = slice(piece.local_row, piece.local_row + piece.rows)
        assert np.isnan(target[span]).all(), f"{piece} overlaps another"
        target[span] = source[piece.dense_row : piece.dense_row + piece.rows]
    assert not np.isnan(local).any()
    return local


def rows_first(array: np.ndarray, layout: Sharded) -> np.ndarray:
    """A view with the sharded dimension first: rows travel so, also those of dim 1, where they are strided."""
    return array.T if layout.dim else array
