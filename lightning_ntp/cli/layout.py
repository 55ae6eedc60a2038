"""``lightning-ntp layout``: which units each slot holds at a degree, and what moved there from the nominal layout."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_ntp.layout import LayoutFamily

LARGEST_NUM_UNITS = 1_000_000  # rows of the largest vocabularies, each a unit
LARGEST_DOMAIN = 576  # devices of the largest scale-up domain announced


def add_parser(subparsers: Any) -> None:
    """Declare the verb's arguments."""
    parser = subparsers.add_parser("layout", help="show which units each slot holds at a degree", description=__doc__)
    units, slots = _whole_number(LARGEST_NUM_UNITS), _whole_number(LARGEST_DOMAIN)
    parser.add_argument("--units", type=units, required=True, help="units to deal: heads, blocks, experts")
    parser.add_argument("--nominal", type=slots, required=True, help="degree when nothing has failed")
    parser.add_argument("--degree", type=slots, help="degree to show (default: the nominal one)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the layout.

    Raises:
        LayoutError: if the degree is above the nominal one.
    """
    facts = describe(args.units, args.nominal, args.nominal if args.degree is None else args.degree)
    if args.json:
        print(json.dumps(facts))
    else:
        console = Console()
        console.print(_table(facts))
        console.print(_summary(facts), highlight=False)
    return 0


def describe(num_units: int, nominal_degree: int, degree: int) -> dict[str, Any]:
    """The layout as plain data, with its balance and the units that moved.

    Raises:
        LayoutError: if ``degree`` is not in 1..nominal_degree.
    """
    family = LayoutFamily(num_units, nominal_degree)
    layout = family.at(degree)
    return {
        "units": num_units,
        "nominal": nominal_degree,
        "degree": degree,
        "slots": [list(units) for units in layout.slots],
        "loads": list(layout.loads),
        "imbalance": round(layout.imbalance, 3),
        "moved_units": sum(family.at(nominal_degree).loads[degree:]),
    }


def _table(facts: dict[str, Any]) -> Table:
    """One row a slot; what arrived from slots that are gone is marked with a plus."""
    before = LayoutFamily(facts["units"], facts["nominal"]).at(facts["nominal"]).loads
    table = Table("slot", "units", "load")
    for slot, units in enumerate(facts["slots"]):
        kept, arrived = _ranges(units[: before[slot]]), _ranges(units[before[slot] :])
        text = " ".join([*kept, *(f"[green]+{span}[/green]" for span in arrived)])
        table.add_row(str(slot), text or "-", str(len(units)))
    return table


def _summary(facts: dict[str, Any]) -> str:
    where = f"{facts['units']} units at degree {facts['degree']} of {facts['nominal']}"
    return f"{where}: imbalance {facts['imbalance']}, moved units (+): {facts['moved_units']}"


def _ranges(units: Sequence[int]) -> list[str]:
    """``[0, 1, 2, 5]`` as ``["0-2", "5"]``."""
    spans: list[list[int]] = []
    for unit in units:
        if spans and spans[-1][1] == unit - 1:
            spans[-1][1] = unit
        else:
            spans.append([unit, unit])
    return [str(first) if first == last else f"{first}-{last}" for first, last in spans]


def _whole_number(largest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= largest:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number in 1..{largest}")
        return int(text)

    return parse
