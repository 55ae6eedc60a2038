"""Nested layouts: partition, balance, prefix, and what does not depend on anything else."""

from __future__ import annotations

import pytest

from lightning_ntp.errors import LayoutError
from lightning_ntp.layout import Layout, LayoutFamily


def check_family(num_units: int, nominal: int) -> None:
    """Every property of every degree of one family."""
    family = LayoutFamily(num_units, nominal)
    wider = None
    for degree in range(nominal, 0, -1):
        layout = family.at(degree)
        where = f"{family} at {degree}"
        assert layout.degree == degree, where
        assert sorted(unit for units in layout.slots for unit in units) == list(range(num_units)), where
        assert max(layout.loads) - min(layout.loads) <= 1, where
        if wider is not None:
            for before, after in zip(wider.slots, layout.slots, strict=False):
                assert after[: len(before)] == before, where
        wider = layout


@pytest.mark.parametrize("num_units", [1, 2, 3, 5, 8, 13, 31, 64, 101, 128, 200])
def test_partition_balance_prefix(num_units):
    for nominal in (1, 2, 3, 4, 7, 8, 16, 31, 64, 72):
        check_family(num_units, nominal)


@pytest.mark.exhaustive
def test_partition_balance_prefix_everywhere():
    for num_units in range(1, 201):
        for nominal in range(1, 73):
            check_family(num_units, nominal)


def test_nominal_layout_is_contiguous_and_the_first_slots_get_the_rest():
    assert LayoutFamily(10, 4).at(4).slots == ((0, 1, 2), (3, 4, 5), (6, 7), (8, 9))


def test_last_slot_gives_in_its_own_order_to_the_emptiest_lowest_index_first():
    family = LayoutFamily(10, 4)
    assert family.at(3).slots == ((0, 1, 2, 9), (3, 4, 5), (6, 7, 8))
    assert family.at(2).slots == ((0, 1, 2, 9, 7), (3, 4, 5, 6, 8))
    assert family.at(1).slots == ((0, 1, 2, 9, 7, 3, 4, 5, 6, 8),)


def test_64_units_at_8_and_7():
    layout = LayoutFamily(64, 8).at(7)
    assert layout.loads == (10, 9, 9, 9, 9, 9, 9)
    assert layout.slots[0] == (0, 1, 2, 3, 4, 5, 6, 7, 56, 63)
    assert layout.imbalance == pytest.approx(10 * 7 / 64)


def test_fewer_units_than_slots_leaves_slots_empty():
    layout = LayoutFamily(2, 4).at(3)
    assert layout.slots == ((0,), (1,), ())
    assert layout.imbalance == pytest.approx(1.5)


def test_a_layout_depends_on_its_three_numbers_alone():
    assert LayoutFamily(13, 5).at(3) == LayoutFamily(13, 5).at(5).without_last_slot().without_last_slot()
    assert LayoutFamily(13, 5) == LayoutFamily(13, 5) and hash(LayoutFamily(13, 5)) == hash(LayoutFamily(13, 5))


def test_each_unit_is_owned_by_its_only_holder():
    layout = LayoutFamily(7, 3).at(2)
    assert layout.holders == tuple((owner,) for owner in layout.owners)
    assert all(unit in layout.slots[owner] for unit, owner in enumerate(layout.owners))
    assert not layout.is_shared


def test_a_unit_may_have_several_holders():
    layout = Layout(((0, 1), (1,)), owners=(0, 1))
    assert layout.holders == ((0,), (0, 1))
    assert layout.is_shared


@pytest.mark.parametrize(("num_units", "nominal"), [(0, 4), (-1, 4), (4, 0), (4, -2)])
def test_no_family_without_units_or_slots(num_units, nominal):
    with pytest.raises(LayoutError, match=rf"num_units={num_units} to nominal_degree={nominal}"):
        LayoutFamily(num_units, nominal)


@pytest.mark.parametrize("degree", [0, -1, 5])
def test_degree_outside_the_family(degree):
    with pytest.raises(LayoutError, match=rf"degree={degree} is outside 1\.\.4"):
        LayoutFamily(8, 4).at(degree)
