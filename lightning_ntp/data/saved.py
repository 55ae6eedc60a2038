"""The form in which a training loader's position is saved: whole numbers and lists of them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lightning_ntp.data.cut import CutRule, Window
from lightning_ntp.data.position import Position

_COUNTS = ("count", "whole", "tail")


def pack_state(facts: dict[str, int], position: Position, window: Window | None, rule: CutRule) -> dict[str, Any]:
    """A position, with the cut of the window under way: a replay may have dealt it as no rule would.

    Args:
        facts: Whatever else is saved.
        position: The micro-batch that comes next.
        window: The window under way; None between two windows.
        rule: How the next window is cut.
    """
    return {
        "version": 2,
        **facts,
        **asdict(position),
        "micro_batches": rule.micro_batches,
        "shares": list(rule.shares if window is None else window.shares),
        # Nothing in these between two windows.
        "parts": [] if window is None else list(window.parts),
        **{name: 0 if window is None else getattr(window, name) for name in _COUNTS},
    }


def unpack_state(state: dict[str, Any]) -> tuple[Position, Window | None]:
    """The position and the window under way that ``pack_state`` has saved."""
    position = Position(state["cursor"], state["window"], state["index"], state["yielded"])
    if not state["parts"]:
        return position, None
    shares, parts = tuple(state["shares"]), tuple(state["parts"])
    counts = {name: state[name] for name in _COUNTS}
    return position, Window(position.window, position.cursor, shares, parts, **counts)
