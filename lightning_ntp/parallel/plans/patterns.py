"""From a style for each module to the few patterns that a reader wants to see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

from torch import nn

from lightning_ntp.parallel.plan import ParallelPlan, matching
from lightning_ntp.parallel.styles import Style


def compress(styles: Mapping[str, Style], model: nn.Module) -> ParallelPlan:
    """The plan with the most general patterns that say the same: numbers become ``*`` where all hits have one
    style. Patterns are in the model's order.

    Args:
        styles: Module name -> style.
        model: Whose module names the patterns are matched against.
    """
    names = [name for name, _ in model.named_modules() if name]
    styles = {name: styles[name] for name in names if name in styles}  # in the model's order
    patterns: dict[str, Style] = {}
    covered: set[str] = set()
    known: dict[str, list[str]] = {}
    for name, style in styles.items():
        if name in covered:
            continue
        for pattern in _candidates(name):
            if pattern not in known:
                known[pattern] = matching(pattern, names) or [name]
            hits = known[pattern]
            if all(styles.get(hit) == style and hit not in covered for hit in hits):
                patterns[pattern] = style
                covered.update(hits)
                break
    return ParallelPlan(patterns)


def _candidates(name: str) -> Iterator[str]:
    """Every way to write ``*`` for numbers in a name, the most general first, the name itself last."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    for count in range(len(numbers), -1, -1):
        for chosen in combinations(numbers, count):
            yield ".".join("*" if index in chosen else part for index, part in enumerate(parts))
