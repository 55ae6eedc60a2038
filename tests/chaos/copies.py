"""Whether what several members hold is bitwise equal: replicated tensors directly, sharded ones unit by unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from lightning_ntp.layout import Replicated
from tests.chaos.journal import Arrays, MemberReport, StepState


def copy_problems(reports: Mapping[str, MemberReport], step: int) -> list[str]:
    """What differs between the members that told of a step: parameters, states, and all that has no shape."""
    there = [(report, report.steps[step]) for report in reports.values() if step in report.steps]
    known: dict[tuple[str, str, int, int], tuple[str, np.ndarray]] = {}
    found = []
    first_report, first = there[0]
    for report, state in there:
        if (state.scalars, state.norm, state.lr) != (first.scalars, first.norm, first.lr):
            found.append(f"step {step}: {report.name} and {first_report.name} differ in scalars, norm or learning rate")
        for name, key, segment, unit, rows in _units(report, state):
            other, theirs = known.setdefault((name, key, segment, unit), (report.name, rows))
            if not np.array_equal(rows, theirs):
                what = f"{name} {key or 'weight'}, unit {unit}"
                found.append(f"step {step}: {what}, differs at {report.name} and {other}")
    return found


def _units(report: MemberReport, state: StepState) -> Iterator[tuple[str, str, int, int, np.ndarray]]:
    """(parameter, key of the state, segment, unit, its rows) of all that a member holds."""
    for name, layout in report.layouts.items():
        tensors: Arrays = {"": state.weights[name], **state.states.get(name, {})}
        for key, tensor in tensors.items():
            if isinstance(layout, Replicated):
                yield name, key, 0, 0, tensor
                continue
            for piece in layout.pieces(state.degree, state.slot):
                rows = slice(piece.local_row, piece.local_row + piece.rows)
                yield name, key, piece.segment, piece.unit, tensor[(slice(None),) * layout.dim + (rows,)]
