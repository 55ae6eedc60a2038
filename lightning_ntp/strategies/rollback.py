"""What a second run of a step must find in the Trainer as the first did."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from operator import neg
from typing import Any

import torch

from lightning_ntp.compat import loops
from lightning_ntp.compat.torchmetrics import metric_snapshot, metrics_of, restore_metric, update_count
from lightning_ntp.engine.snapshot import snapshot_of

log = logging.getLogger(__name__)

Restore = Callable[[], None]


class StepSnapshot:
    """Rolls a training window back: logged values, metrics, buffers, random numbers, counters.

    Args:
        trainer: At the start of a window.
    """

    def __init__(self, trainer: Any) -> None:
        module = trainer.lightning_module
        self._metrics = _MetricsOfPasses(module)
        self._parts = [
            loops.results_snapshot(trainer),
            loops.progress_snapshot(trainer),
            loops.toggled_snapshot(module),
            _schedule_snapshot(trainer),
            self._metrics.restore,
            snapshot_of(module),
        ]

    def passing(self) -> AbstractContextManager[None]:
        """Around whatever will be run again: hooks around it, such as ``on_train_batch_end``, will not be."""
        return self._metrics.passing()

    def restore(self) -> None:
        for part in self._parts:
            part()


class _MetricsOfPasses:
    """Rolls metrics back that passes have updated, and leaves alone those that only hooks around them update."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._states = [(metric, metric_snapshot(metric)) for metric in metrics_of(module)]
        self._before = self._inside = [0] * len(self._states)

    @contextmanager
    def passing(self) -> Iterator[None]:
        self._before = self._counts()
        try:
            yield
        finally:
            now = self._counts()
            self._inside = [sum(each) for each in zip(self._inside, now, map(neg, self._before), strict=True)]

    def restore(self) -> None:
        for (metric, state), before, inside in zip(self._states, self._before, self._inside, strict=True):
            is_touched_outside = before - inside != update_count(state)
            if inside or not is_touched_outside:
                restore_metric(metric, state)
            if inside and is_touched_outside:
                log.warning(
                    "%s is updated in training_step and in a hook around it: with the step that is run again now, "
                    "the hook's updates in its window are lost; use one metric for each place",
                    type(metric).__name__,
                )
        self._before, self._inside = self._counts(), [0] * len(self._states)

    def _counts(self) -> list[int]:
        return [update_count(vars(metric)) for metric, _ in self._states]


def evaluation_snapshot(trainer: Any) -> Restore:
    """The same for an evaluation step. It also brings back whether each module trains or evaluates."""
    module = trainer.lightning_module
    modes = [(child, child.training) for child in module.modules()]
    parts = [loops.results_snapshot(trainer), _metrics_snapshot(module), snapshot_of(module)]

    def restore() -> None:
        for child, mode in modes:
            child.training = mode
        for part in parts:
            part()

    return restore


def _metrics_snapshot(module: torch.nn.Module) -> Restore:
    states = [(metric, metric_snapshot(metric)) for metric in metrics_of(module)]

    def restore() -> None:
        for metric, state in states:
            restore_metric(metric, state)

    return restore


def _schedule_snapshot(trainer: Any) -> Restore:
    """Schedulers and the options that they set: a manual ``training_step`` may step them."""
    if trainer.lightning_module.automatic_optimization:
        return lambda: None  # Lightning steps them behind the unit
    found = [config.scheduler for config in trainer.lr_scheduler_configs]
    schedulers = [(scheduler, deepcopy(scheduler.state_dict())) for scheduler in found]
    groups = [
        (group, {key: deepcopy(value) for key, value in group.items() if key != "params"})
        for optimizer in trainer.optimizers
        for group in optimizer.param_groups
    ]

    def restore() -> None:
        for scheduler, state in schedulers:
            scheduler.load_state_dict(deepcopy(state))
        for group, options in groups:
            group.update(deepcopy(options))

    return restore
