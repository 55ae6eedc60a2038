"""Parallel plans: module name patterns and their styles."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from lightning_ntp.errors import PlanError
from lightning_ntp.parallel.styles import Style, format_style, parse_style


class ParallelPlan:
    """Which modules are sharded, and how.

    Args:
        styles: Patterns of module names, where ``*`` stands for one name between dots, to styles as objects or strings:
            ``{"model.layers.*.attn": "attention(num_heads=8, num_kv_heads=2)", "model.layers.*.mlp": "ffn"}``.
            Modules that no pattern names are replicated.

    Raises:
        PlanError: if a style cannot be read, or a pattern has ``**``.
    """

    def __init__(self, styles: Mapping[str, str | Style]) -> None:
        for pattern in styles:
            if "**" in str(pattern):
                raise PlanError(
                    f"plan pattern {pattern!r} has '**', which is not known: write one '*' for every name between dots"
                )
        self.styles: dict[str, Style] = {pattern: parse_style(style, pattern) for pattern, style in styles.items()}

    def with_prefix(self, prefix: str) -> ParallelPlan:
        """The same plan for a model that sits at ``prefix`` inside another."""
        return ParallelPlan({f"{prefix}.{pattern}" if prefix else pattern: s for pattern, s in self.styles.items()})

    def match(self, model: nn.Module) -> dict[str, Style]:
        """Module name -> style.

        Raises:
            PlanError: if a pattern names no module, or two patterns name one.
        """
        names = [name for name, _ in model.named_modules() if name]
        matched: dict[str, tuple[str, Style]] = {}
        for pattern, style in self.styles.items():
            hits = matching(pattern, names)
            if not hits:
                raise PlanError(f"plan pattern {pattern!r} names no module of the model{_suggest(pattern, names)}")
            for name in hits:
                if name in matched:
                    raise PlanError(f"plan patterns {matched[name][0]!r} and {pattern!r} both name {name!r}; keep one")
                matched[name] = (pattern, style)
        return {name: style for name, (_, style) in matched.items()}

    def as_strings(self) -> dict[str, str]:
        """The plan in the form that YAML files use."""
        return {pattern: format_style(style) for pattern, style in self.styles.items()}

    def __iter__(self) -> Iterator[tuple[str, Style]]:
        return iter(self.styles.items())

    def __repr__(self) -> str:
        return f"ParallelPlan({self.as_strings()})"


def generalize(name: str) -> str:
    """A name with its numbers replaced by ``*``."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern stands for."""
    regex = _regex(pattern)
    return [name for name in names if regex.fullmatch(name)]


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(r"\.".join(re.escape(part).replace(r"\*", "[^.]+") for part in pattern.split(".")))


def _suggest(pattern: str, names: list[str]) -> str:
    close = difflib.get_close_matches(pattern, sorted({generalize(name) for name in names}), n=3, cutoff=0.4)
    return f"; similar names are {', '.join(map(repr, close))}" if close else f"; it has {', '.join(names[:8])}, ..."
