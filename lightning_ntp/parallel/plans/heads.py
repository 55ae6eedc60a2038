"""How many heads an attention block has: read from its attributes, from a config above it, or from its shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from lightning_ntp.errors import PlanError
from lightning_ntp.parallel.names import CONFIG_NAMES, HEAD_COUNT_NAMES, HEAD_SIZE_NAMES


def num_heads_of(model: nn.Module, name: str, width: int) -> int | None:
    """Query heads of the block ``name``, or None if nothing says it.

    The block's own count goes first, then ``width`` over the block's head size, then the nearest config, then the
    modules around the block.

    Args:
        model: The model that holds the block.
        name: The block's name.
        width: Features of all query heads: what the output projection reads.
    """
    block = model.get_submodule(name)
    own = _number(block, HEAD_COUNT_NAMES)
    size = _number(block, HEAD_SIZE_NAMES)
    if own is None and size is not None and width % size == 0:
        own = width // size
    return own if own is not None else next(_counts_above(model, name), None)


def kv_heads_of(name: str, num_heads: int, width: int, kv_width: int) -> int:
    """KV heads, which follow from the shapes once the query heads are known.

    Raises:
        PlanError: if the projections do not make whole heads.
    """
    head_dim, rest = divmod(width, num_heads)
    if rest or kv_width % head_dim or not kv_width or num_heads % (kv_width // head_dim):
        raise PlanError(
            f"the head counts of {name!r} are not known: num_heads={num_heads} does not fit {width} query and "
            f"{kv_width} KV features; write them in the plan: 'attention(num_heads=..., num_kv_heads=...)'"
        )
    return kv_width // head_dim


def _counts_above(model: nn.Module, name: str) -> Iterator[int]:
    parts = name.split(".") if name else []
    for depth in range(len(parts), -1, -1):
        module = model.get_submodule(".".join(parts[:depth]))
        for holder in (*_configs(module), module):
            count = _number(holder, HEAD_COUNT_NAMES)
            if count is not None:
                yield count


def _configs(module: nn.Module) -> Iterator[Any]:
    yield from (config for name in CONFIG_NAMES if (config := getattr(module, name, None)) is not None)


def _number(holder: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
