"""The private parts of torchmetrics that this package uses, each behind a check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric
from torchmetrics import __version__ as version

from lightning_ntp.errors import UnsupportedError

_COUNTERS = ("_update_count", "_computed", "_forward_cache")


def metric_snapshot(metric: Metric) -> dict[str, Any]:
    """A copy of all that an ``update`` changes in a metric.

    Raises:
        UnsupportedError: if this torchmetrics keeps it elsewhere.
    """
    if not hasattr(metric, "_defaults"):
        raise UnsupportedError(f"torchmetrics {version} keeps metric states in another way")
    names = [*metric._defaults, *(name for name in _COUNTERS if hasattr(metric, name))]
    return {name: _copy(getattr(metric, name)) for name in names}


def metrics_of(module: nn.Module) -> list[Metric]:
    """All metrics inside a module."""
    return [metric for metric in module.modules() if isinstance(metric, Metric)]


def update_count(state: Mapping[str, Any]) -> int:
    """How often a metric has been updated, by its attributes or a snapshot of it; 0 where it is not counted."""
    return state.get("_update_count", 0)


def restore_metric(metric: Metric, snapshot: dict[str, Any]) -> None:
    """Put a metric back to where ``metric_snapshot`` found it."""
    for name, value in snapshot.items():
        setattr(metric, name, _copy(value))


@contextmanager
def keeping_forward_value(metric: Metric) -> Iterator[None]:
    """What ``forward`` has returned last stays, whatever is done to the metric inside."""
    if not hasattr(metric, "_forward_cache"):
        raise UnsupportedError(f"torchmetrics {version} keeps the value of a step in another way")
    value = metric._forward_cache
    yield
    metric._forward_cache = value


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value
