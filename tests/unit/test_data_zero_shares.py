"""Replicas without members: share 0, and everybody keeps his number."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from lightning_ntp.data.cut import CutRule, Extent, cut_window
from tests.unit.data_helpers import Buckets, Squares, global_batches, make_loaders, walk


@pytest.mark.parametrize("shares", [(12, 0, 12), (0, 0, 24), (24, 0, 0)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_live_replicas_take_it_all(shares, drop_last):
    loader = DataLoader(Squares(67), batch_size=4, shuffle=True, drop_last=drop_last)
    loaders = make_loaders(loader, shares, 2)
    facts = [walk(one) for one in loaders]
    batches = global_batches(facts)
    dead = [one for one, share in zip(facts, shares, strict=True) if not share]
    assert all(fact.is_dummy for one in dead for fact in one)
    assert {len(one) for one in facts} == {len(one) for one in loaders}
    # Of the 19 left, drop_last keeps a whole batch of 6 or 12 on every live replica.
    assert [len(batch) for batch in batches] == [24, 24, 12 if drop_last else 19]


def test_drop_last_looks_at_live_replicas_only():
    extent = Extent(13)
    assert cut_window(CutRule((8, 0, 8), 2, drop_last=True), extent, 0, 0).parts == (4, 0, 4)
    assert cut_window(CutRule((9, 0, 7), 2, drop_last=True), extent, 0, 0) is None
    assert cut_window(CutRule((0, 6, 0), 3, drop_last=True), Extent(5), 0, 0).sizes == ((0, 0), (2, 2), (0, 0))


def test_fewer_samples_than_replicas():
    facts = [walk(one) for one in make_loaders(DataLoader(Squares(3), batch_size=1), (1, 0, 0, 0))]
    assert [len(one) for one in facts] == [3] * 4
    assert sum(global_batches(facts), []) == [0, 1, 2]


def test_a_batch_samplers_lists_are_dealt_to_the_live_replicas():
    loader = DataLoader(Squares(21), batch_sampler=Buckets([3, 2, 5, 1, 4, 6]))
    facts = [walk(one) for one in make_loaders(loader, (4, 0, 4))]
    assert sorted(sum(global_batches(facts), [])) == list(range(21)) and len(facts[0]) == 2
    assert all(fact.is_dummy for fact in facts[1])
