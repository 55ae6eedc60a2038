"""Whether part of the model was really lost: from a recorded view, by the layout alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_ntp.layout import ParameterLayout, Replicated

Place = tuple[int, int]
"""(degree, slot)."""


def lost_parameters(view: Mapping[str, Any], layouts: Mapping[str, ParameterLayout]) -> list[str]:
    """Names of the parameters of which no member of the view holds all units.

    Args:
        view: As JSON, with what each member said that it holds.
        layouts: Of all parameters, in order.
    """
    members = [seat for replica in view["seats"] for seat in replica]
    held = [_places(view["holdings"].get(seat)) for seat in members]
    lost = []
    for index, (name, layout) in enumerate(layouts.items()):
        places = {place for places in held if places for place in places[index]}
        if not _is_covered(layout, places):
            lost.append(name)
    return lost


def _places(holdings: Mapping[str, Any] | None) -> list[set[Place]]:
    """For each parameter where the parts belong that a member holds: runs of equal entries, (replica, degree, slot)."""
    runs = [] if holdings is None else holdings["held"]
    return [{(degree, slot) for _, degree, slot in tag} for count, tag in runs for _ in range(count)]


def _is_covered(layout: ParameterLayout, places: set[Place]) -> bool:
    if isinstance(layout, Replicated):
        return bool(places)
    for segment in layout.segments:
        units = {unit for degree, slot in places for unit in segment.family.at(degree).slots[slot]}
        if units != set(range(segment.family.num_units)):
            return False
    return True
