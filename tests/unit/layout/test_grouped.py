"""KV heads follow the query heads: who holds them, in which order, and who owns their sum."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.errors import LayoutError
from lightning_ntp.layout import GroupedFamily

HEADS = [(8, 8, 4), (8, 2, 4), (6, 3, 4), (7, 7, 3), (12, 1, 5), (64, 8, 8), (32, 8, 8), (48, 8, 16), (5, 1, 8)]

grouped_families = st.builds(
    lambda kv_heads, group, nominal: GroupedFamily(kv_heads * group, kv_heads, nominal),
    st.integers(1, 16),
    st.integers(1, 8),
    st.integers(1, 16),
)


def check_grouped(family: GroupedFamily) -> None:
    """Every property of every degree of one family."""
    group = family.num_heads // family.num_kv_heads
    wider = None
    for degree in range(family.nominal_degree, 0, -1):
        layout, queries = family.at(degree), family.queries.at(degree)
        for slot, heads in enumerate(queries.slots):
            needed = [head // group for head in heads]
            assert layout.slots[slot] == tuple(dict.fromkeys(needed))
            assert [layout.slots[slot][index] for index in family.reads(degree, slot)] == needed
        for unit, owner in enumerate(layout.owners):
            served = [sum(head // group == unit for head in heads) for heads in queries.slots]
            assert served[owner] == max(served) and owner == served.index(max(served))
            assert layout.holders[unit] == tuple(slot for slot in range(degree) if served[slot])
        if wider is not None:
            for before, after in zip(wider.slots, layout.slots, strict=False):
                assert after[: len(before)] == before
        wider = layout


@pytest.mark.parametrize("numbers", HEADS)
def test_holders_owners_order_prefix(numbers):
    check_grouped(GroupedFamily(*numbers))


@given(grouped_families)
def test_holders_owners_order_prefix_anywhere(family):
    check_grouped(family)


def test_64_query_8_kv_heads_at_8_and_7():
    family = GroupedFamily(64, 8, 8)
    assert family.queries.at(7).loads == (10, 9, 9, 9, 9, 9, 9)
    assert family.at(8).loads == (1,) * 8 and not family.at(8).is_shared
    assert sum(family.at(7).loads) == 14 and family.at(7).is_shared
    assert family.at(7).holders[7] == (0, 1, 2, 3, 4, 5, 6)
    assert family.at(7).owners == (0, 1, 2, 3, 4, 5, 6, 0)  # slot 0 has two heads of group 7, the others one


def test_sorted_order_would_break_the_prefix_property():
    """The reason for first-use order: slot 0 gets head 6 from slot 3 first, the lower head 4 from slot 2 later."""
    family = GroupedFamily(8, 8, 4)
    assert [family.at(degree).slots[0] for degree in (4, 3, 2)] == [(0, 1), (0, 1, 6), (0, 1, 6, 4)]


def test_more_slots_than_kv_heads_replicates_them():
    layout = GroupedFamily(8, 2, 4).at(4)
    assert layout.slots == ((0,), (0,), (1,), (1,))
    assert layout.owners == (0, 2)


def test_empty_slot_holds_no_kv_head():
    family = GroupedFamily(5, 1, 8)
    assert family.at(8).slots == ((0,),) * 5 + ((),) * 3
    assert family.reads(8, 7) == ()
    assert family.local_group(8, 7) == 5


@pytest.mark.parametrize(
    ("degree", "slot", "group"),
    [
        (8, 0, 8),
        (7, 0, None),  # eight heads of group 0, two of group 7
        (7, 3, None),  # eight heads of group 3, one of group 7
        (1, 0, None),  # slot 0 has all heads, in the order in which they arrived
    ],
)
def test_local_group_of_64_query_8_kv_heads(degree, slot, group):
    assert GroupedFamily(64, 8, 8).local_group(degree, slot) == group


@given(grouped_families, st.data())
def test_local_group_is_what_repeat_kv_expects(family, data):
    degree = data.draw(st.integers(1, family.nominal_degree))
    slot = data.draw(st.integers(0, degree - 1))
    reads, group = family.reads(degree, slot), family.local_group(degree, slot)
    kv_heads = len(family.at(degree).slots[slot])
    repeated = {size: tuple(i for i in range(kv_heads) for _ in range(size)) for size in range(1, len(reads) + 1)}
    if reads:
        assert [size for size in repeated if repeated[size] == reads] == ([] if group is None else [group])


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 3), (8, 0), (4, 8), (8, -1)])
def test_unequal_groups_are_refused(heads, kv_heads):
    with pytest.raises(LayoutError, match=rf"num_heads={heads} .*num_kv_heads={kv_heads}"):
        GroupedFamily(heads, kv_heads, 4)
