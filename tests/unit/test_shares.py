"""Shares: how a global batch is dealt to replicas of unequal degree."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ntp.errors import ConfigError
from lightning_ntp.policy import check_shares, deal, shares_after, shares_by_degree, whole_shares


@given(st.integers(0, 5000), st.lists(st.integers(0, 64), min_size=1, max_size=12).filter(any))
@settings(max_examples=300, deadline=None)
def test_deal_gives_all_samples_within_one_of_the_exact_part(n, weights):
    parts = deal(n, weights)
    assert sum(parts) == n
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - n * weight / sum(weights)) < 1


def test_deal_gives_ties_to_the_lowest_replica():
    assert deal(5, (1, 1)) == (3, 2)
    assert deal(1, (1, 1, 1)) == (1, 0, 0)


@pytest.mark.parametrize("n, weights", [(-1, (1, 1)), (4, (0, 0)), (4, (2, -1)), (4, ())])
def test_deal_refuses_what_cannot_be_dealt(n, weights):
    with pytest.raises(ConfigError, match="cannot deal"):
        deal(n, weights)


@pytest.mark.parametrize(
    "per_replica, degrees, nominal, mode, shares",
    [
        (8, (4, 4), 4, "constant", (8, 8)),
        (8, (4, 3), 4, "constant", (9, 7)),
        (8, (8, 7), 8, "constant", (9, 7)),
        (4, (4, 3, 2), 4, "constant", (5, 4, 3)),
        (1, (8, 1), 8, "constant", (2, 0)),
        (8, (4, 0, 3), 4, "constant", (14, 0, 10)),
        (8, (4, 0, 3), 4, "shrink", (8, 0, 6)),
        (1, (0, 1), 4, "shrink", (0, 1)),
        (8, (4, 3), 4, "shrink", (8, 6)),
        (6, (4, 3), 4, "shrink", (6, 4)),
        (1, (4, 1), 4, "shrink", (1, 1)),
    ],
)
def test_shares_by_degree(per_replica, degrees, nominal, mode, shares):
    assert shares_by_degree(per_replica, degrees, nominal, mode) == shares


@given(st.integers(1, 64), st.lists(st.integers(0, 8), min_size=1, max_size=8).filter(any))
@settings(deadline=None)
def test_constant_keeps_the_sum_and_shrink_never_exceeds_the_nominal_share(per_replica, degrees):
    constant = shares_by_degree(per_replica, degrees, 8, "constant")
    shrunk = shares_by_degree(per_replica, degrees, 8, "shrink")
    assert sum(constant) == per_replica * len(degrees)
    for degree, constant_share, share in zip(degrees, constant, shrunk, strict=True):
        assert (1 <= share <= per_replica) if degree else (share == constant_share == 0)


@st.composite
def changed_degrees(draw):
    """Shares and degrees at the start, and degrees now."""
    replicas = draw(st.integers(1, 6))
    same_length = {"min_size": replicas, "max_size": replicas}
    base = draw(st.lists(st.integers(0, 40), **same_length).filter(any))
    before = draw(st.lists(st.integers(1, 8), **same_length))
    now = draw(st.lists(st.integers(0, 8), **same_length).filter(any))
    return tuple(base), tuple(before), tuple(now)


@given(changed_degrees())
@settings(max_examples=400, deadline=None)
def test_shares_by_hand_follow_the_degrees(case):
    base, before, now = case
    constant, shrunk = (shares_after(base, before, now, mode) for mode in ("constant", "shrink"))
    assert sum(constant) == sum(base) >= sum(shrunk) > 0
    for shares in (constant, shrunk):
        assert all(share == 0 for share, degree in zip(shares, now, strict=True) if not degree)
    has_share = any(share and degree for share, degree in zip(base, now, strict=True))
    if has_share:
        exact = [share * degree / then for share, degree, then in zip(base, now, before, strict=True)]
        for part, share in zip(exact, constant, strict=True):
            assert abs(share - sum(base) * part / sum(exact)) < 1
    if has_share and all(degree <= then for degree, then in zip(now, before, strict=True)):
        for part, share, shrunk_share, degree in zip(exact, base, shrunk, now, strict=True):
            assert shrunk_share == max(math.floor(part + 1e-9), 1 if share and degree else 0) <= share
    assert shares_after(base, before, before, "constant") == shares_after(base, before, before, "shrink") == base


@given(st.integers(1, 40), st.lists(st.integers(0, 8), min_size=1, max_size=6).filter(any))
@settings(deadline=None)
def test_shares_by_hand_that_are_the_nominal_ones_follow_the_degrees_as_those_do(per_replica, degrees):
    replicas = len(degrees)
    for mode in ("constant", "shrink"):
        after = shares_after((per_replica,) * replicas, (8,) * replicas, degrees, mode)
        assert after == shares_by_degree(per_replica, degrees, 8, mode)


@pytest.mark.parametrize(
    "base, before, now, mode, shares",
    [
        ((5, 3), (4, 4), (4, 2), "constant", (6, 2)),
        ((5, 3), (4, 4), (4, 2), "shrink", (5, 1)),
        ((5, 3), (4, 4), (4, 0), "constant", (8, 0)),
        ((9, 7), (4, 3), (4, 2), "constant", (11, 5)),
        ((6, 0, 6), (2, 2, 2), (0, 1, 2), "constant", (0, 0, 12)),
        ((6, 0, 0), (4, 4, 4), (0, 4, 2), "constant", (0, 4, 2)),  # only replicas without a share are left
        ((6, 0, 0), (4, 4, 4), (0, 4, 2), "shrink", (0, 4, 2)),
        ((8, 6), (4, 3), (4, 4), "shrink", (7, 7)),  # grown, within what was given
    ],
)
def test_shares_after(base, before, now, mode, shares):
    assert shares_after(base, before, now, mode) == shares


def test_a_replica_that_grows_takes_more_where_the_global_batch_has_room():
    assert shares_after((8, 6), (4, 3), (4, 4), "shrink", global_batch=16) == (8, 8)
    assert shares_after((8, 6), (4, 3), (4, 4), "shrink", global_batch=15) == (8, 7)


@pytest.mark.parametrize(
    "arguments, text",
    [
        (((5, 3), (4, 4), (4,), "constant"), "not of equal length"),
        (((5, 3), (4, 0), (4, 4), "constant"), r"base_degrees=\(4, 0\): every replica had at least 1 member"),
        (((5, 3), (4, 4), (0, 0), "shrink"), r"degrees=\(0, 0\): no replica has a live member"),
        (((5, 3), (4, 4), (4, -1), "shrink"), "degree -1 of replica 1 is negative"),
        (((0, 0), (4, 4), (4, 4), "shrink"), "give no replica a sample"),
        (((5, 3), (4, 4), (4, 4), "grow"), "mode='grow'"),
    ],
)
def test_shares_after_names_what_is_wrong(arguments, text):
    with pytest.raises(ConfigError, match=text):
        shares_after(*arguments)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ((8, (5, 3), 4, "constant"), r"degree 5 of replica 0 is outside 0\.\.4"),
        ((8, (4, -1), 4, "shrink"), "degree -1 of replica 1"),
        ((8, (0, 0), 4, "shrink"), r"degrees=\(0, 0\): no replica has a live member"),
        ((0, (4, 3), 4, "constant"), "per_replica=0"),
        ((8, (4, 3), 4, "grow"), "mode='grow'"),
    ],
)
def test_shares_by_degree_names_what_is_wrong(arguments, text):
    with pytest.raises(ConfigError, match=text):
        shares_by_degree(*arguments)


def test_shares_by_hand_pass():
    assert check_shares([9, 7], 16, 2, "constant") == (9, 7)
    assert check_shares([8, 6], 16, 2, "shrink") == (8, 6)
    assert check_shares([16, 0], 16, 2, "constant") == (16, 0)


@pytest.mark.parametrize(
    "shares, global_batch, replicas, mode, text",
    [
        ((math.nan, 8), 16, 2, "constant", "nan of replica 0 is not a whole number"),
        ((8.5, 7.5), 16, 2, "constant", "8.5 of replica 0 is not a whole number"),
        ((9.0, 7), 16, 2, "constant", "9.0 of replica 0"),
        ((True, 15), 16, 2, "constant", "True of replica 0"),
        (("8", 8), 16, 2, "constant", "'8' of replica 0"),
        ((17, -1), 16, 2, "constant", "-1 of replica 1"),
        ((16,), 16, 2, "constant", "1 entries for 2 replicas"),
        ((8, 4, 4), 16, 2, "constant", "3 entries for 2 replicas"),
        ((9, 8), 16, 2, "constant", "add up to 17, but the global batch has 16"),
        ((7, 7), 16, 2, "constant", "add up to 14, but the global batch has 16"),
        ((9, 8), 16, 2, "shrink", "more than the 16 samples"),
        ((1, 1), 1, 2, "constant", "smaller than the 2 replicas"),
        ((1, 0), 2, 2, "shrink", "smaller than the replicas"),
        ((0, 0), 16, 2, "constant", "give no replica a sample"),
        ((8, 8), 16, 2, "auto", "mode='auto'"),
    ],
)
def test_shares_by_hand_name_what_is_wrong(shares, global_batch, replicas, mode, text):
    with pytest.raises(ConfigError, match=text):
        check_shares(shares, global_batch, replicas, mode)


def test_whole_shares_takes_numpy_integers():
    numpy = pytest.importorskip("numpy")
    shares = whole_shares(numpy.array([5, 3]))
    assert shares == (5, 3)
    assert all(type(share) is int for share in shares)
