"""B1: deaths at every phase for every kind of victim, each run compared with the dense run step by step."""

from __future__ import annotations

import pytest

from tests.chaos.checks import check_row
from tests.chaos.parity import Dense
from tests.chaos.table import DEGREES, Row, scenario_of, table


@pytest.fixture(scope="module")
def dense() -> dict[tuple[int, ...], Dense]:
    return {degrees: Dense.of(scenario_of(degrees)) for degrees in DEGREES}


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", table().values(), ids=table())
def test_deaths_at_every_phase(workers, dense, row: Row):
    check_row(workers, row, dense[row.degrees])
