"""The cut of an epoch: pure arithmetic."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ntp.data.cut import CutRule, Extent, count_micro_batches, cut_again, cut_evenly, cut_window
from lightning_ntp.data.position import cut_passes
from lightning_ntp.policy import deal


def all_windows(rule, extent):
    windows, start = [], 0
    while (window := cut_window(rule, extent, start, len(windows))) is not None:
        windows.append(window)
        start = window.stop
    return windows


shares = st.lists(st.integers(0, 12), min_size=1, max_size=5).filter(any).map(tuple)


@given(shares, st.integers(1, 5), st.integers(1, 200), st.booleans())
@settings(max_examples=400, deadline=None)
def test_windows_tile_the_epoch(shares, k, total, drop_last):
    rule, extent = CutRule(shares, k, drop_last), Extent(total)
    windows = all_windows(rule, extent)
    positions = [p for w in windows for r in range(len(shares)) for i in range(w.count) for p in w.span(r, i)]
    assert positions == list(range(len(positions)))
    assert len(positions) == total or (drop_last and total - len(positions) < sum(shares))
    assert sum(window.count for window in windows) == count_micro_batches(rule, extent, 0)
    for window in windows:
        assert 1 <= window.count <= k
        assert all(len(sizes) == window.count for sizes in window.sizes)
        assert all(max(sizes) - min(sizes) <= 1 for sizes in window.sizes)
    # No micro-batch of the partial window is bigger than those of a full one.
    for replica, share in enumerate(shares):
        assert all(max(window.sizes[replica]) <= max(1, -(-share // k)) for window in windows)


@given(shares, st.integers(1, 4), st.lists(st.integers(1, 9), min_size=1, max_size=40))
@settings(max_examples=300, deadline=None)
def test_lists_of_a_batch_sampler_stay_together(shares, k, lists):
    rule, extent = CutRule(shares, k), Extent(sum(lists), tuple(accumulate(lists)))
    windows = all_windows(rule, extent)
    size = len(shares) * k
    assert [w.samples for w in windows] == [sum(lists[i : i + size]) for i in range(0, len(lists), size)]
    assert sum(window.count for window in windows) == count_micro_batches(rule, extent, 0)


def test_micro_batches_of_unequal_shares():
    window = cut_window(CutRule((5, 3), 3), Extent(100), 8, 1)
    assert window.sizes == ((2, 2, 1), (1, 1, 1))
    assert [window.span(1, i) for i in range(3)] == [range(13, 14), range(14, 15), range(15, 16)]


def test_a_share_below_k_ends_in_empty_micro_batches():
    assert cut_window(CutRule((4, 2), 3), Extent(6), 0, 0).sizes == ((2, 1, 1), (1, 1, 0))


def test_the_partial_window_has_as_many_micro_batches_as_it_needs():
    rule = CutRule((6, 6), 3)
    assert cut_window(rule, Extent(7), 0, 0).sizes == ((2, 2), (2, 1))
    assert cut_window(rule, Extent(1), 0, 0).sizes == ((1,), (0,))
    assert cut_window(CutRule((9, 7), 1), Extent(5), 0, 0).sizes == ((3,), (2,))


def test_drop_last_keeps_whole_batches_of_equal_shares_only():
    assert cut_window(CutRule((6, 6), 3, drop_last=True), Extent(11), 0, 0).sizes == ((2, 2), (2, 2))
    assert cut_window(CutRule((6, 6), 3, drop_last=True), Extent(3), 0, 0) is None
    assert cut_window(CutRule((7, 5), 3, drop_last=True), Extent(11), 0, 0) is None


def test_a_limit_ends_the_window_early():
    window = cut_window(CutRule((6, 6), 3), Extent(100), 0, 0, room=2)
    assert (window.count, window.whole, window.samples, window.stop) == (2, 3, 8, 8)
    assert window.span(1, 0) == range(4, 6)
    assert cut_window(CutRule((6, 6), 3), Extent(100), 0, 0, room=0) is None


@given(shares, st.data(), st.integers(1, 5), st.integers(1, 60), st.none() | st.integers(1, 3), st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_window_cut_again(before, data, k, total, room, is_last):
    sizes = st.lists(st.integers(0, 12), min_size=len(before), max_size=len(before)).filter(any).map(tuple)
    after = data.draw(sizes | sizes.map(lambda weights: deal(sum(before), weights)))
    window = cut_window(CutRule(before, k), Extent(total), 0, 0, room)
    again = cut_again(CutRule(after, k), Extent(total), window, is_last)
    assert (again.start, again.index, again.count, again.shares) == (0, 0, window.count, after)
    assert all(part == 0 for part, share in zip(again.parts, after, strict=True) if not share)
    assert 1 <= again.samples <= window.samples
    if is_last or sum(after) >= sum(before):
        assert again.samples == window.samples
    elif again.samples < window.samples:
        # What the new shares carry in so many micro-batches, none bigger than in a full window.
        full = cut_window(CutRule(after, k), Extent(sum(after)), 0, 0)
        assert again.sizes == tuple(sizes[: window.count] for sizes in full.sizes)
    assert cut_again(CutRule(before, k), Extent(total), window, is_last) == window, "at no change nothing changes"


def test_cut_evenly_and_passes():
    assert cut_evenly(5, 3) == (2, 2, 1)
    assert cut_passes(9, 4) == (3, 3, 3)
    assert cut_passes(4, 4) == (4,)
    assert cut_passes(0, 4) == (0,)
    assert cut_passes(9, None) == (9,)
