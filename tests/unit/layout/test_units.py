"""Cutting an extent into units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.errors import LayoutError
from lightning_ntp.layout import LayoutFamily, auto_block, block_units, even_units


def test_even_units():
    assert even_units(24, 4) == (6, 6, 6, 6)


@pytest.mark.parametrize(("extent", "num_units"), [(10, 4), (8, 0), (8, -2)])
def test_units_that_do_not_divide_are_refused(extent, num_units):
    with pytest.raises(LayoutError, match=rf"{extent} rows do not divide into num_units={num_units}"):
        even_units(extent, num_units)


@pytest.mark.parametrize(
    ("extent", "block", "sizes"), [(12, 4, (4, 4, 4)), (10, 4, (4, 4, 2)), (3, 4, (3,)), (3, 1, (1, 1, 1))]
)
def test_block_units_with_a_short_last_one(extent, block, sizes):
    assert block_units(extent, block) == sizes


def worst_imbalance(extent: int, block: int, nominal: int, degrees: range) -> float:
    sizes, worst = block_units(extent, block), 0.0
    for degree in degrees:
        slots = LayoutFamily(len(sizes), nominal).at(degree).slots
        worst = max(worst, max(sum(sizes[unit] for unit in units) for units in slots) * degree / extent)
    return worst


@given(st.integers(1, 20000), st.integers(1, 8), st.data())
def test_auto_block_is_the_largest_power_of_two_under_one_percent(extent, nominal, data):
    degrees = range(data.draw(st.integers(1, nominal)), nominal + 1)
    block = auto_block(extent, nominal, degrees)
    candidates = [1, 2, 4, 8, 16, 32, 64, 128]
    assert block in candidates
    if block > 1:
        assert worst_imbalance(extent, block, nominal, degrees) < 1.01
    for larger in candidates[candidates.index(block) + 1 :]:
        assert worst_imbalance(extent, larger, nominal, degrees) >= 1.01


@pytest.mark.parametrize(
    ("extent", "nominal", "degrees", "block"),
    [
        (28672, 8, (8, 7), 128),  # Llama 70B: 224 blocks divide by 8 and by 7
        (28672, 8, (8, 7, 6), 64),  # 38 of 224 blocks by 6 would be 1.8 % too many
        (44, 4, (4, 3), 1),
        (101, 4, (4, 3), 1),
        (4096, 1, (1,), 128),
    ],
)
def test_auto_block_of_known_models(extent, nominal, degrees, block):
    assert auto_block(extent, nominal, degrees) == block
