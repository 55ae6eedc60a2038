"""Tells a Trainer's callbacks what the engine tells its observers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import Trainer

from lightning_ntp.engine.events import CorruptionEvent, FailureEvent, Observer, ViewEvent
from lightning_ntp.hardware.findings import Finding

log = logging.getLogger(__name__)

FailureCallback = Callable[[str, FailureEvent | ViewEvent | CorruptionEvent | Finding], None]


class FailureCallbacks(Observer):
    """Calls ``on_ntp_*`` of every Lightning callback that has it, then every registered function.

    One that raises is logged: nothing stops a recovery.

    Args:
        trainer: Its callbacks are asked at each event, as they may change.
        functions: Are told every event by the name of its hook.
    """

    def __init__(self, trainer: Trainer, functions: Sequence[FailureCallback]) -> None:
        self._trainer, self._functions = trainer, functions

    def on_failure(self, event: FailureEvent) -> None:
        self._call("on_ntp_failure", event)

    def on_view(self, event: ViewEvent) -> None:
        self._call("on_ntp_view", event)

    def on_change(self, event: ViewEvent) -> None:
        if event.gone:
            self._call("on_ntp_recovered", event)
        if event.joined:
            self._call("on_ntp_rejoin", event)

    def on_corruption(self, event: CorruptionEvent) -> None:
        self._call("on_ntp_corruption", event)

    def on_finding(self, finding: Finding) -> None:
        self._call("on_ntp_finding", finding)

    def _call(self, hook: str, event: Any) -> None:
        trainer, module = self._trainer, self._trainer.lightning_module
        told: list[Callable[[], Any]] = [
            lambda method=method: method(trainer, module, event)
            for callback in trainer.callbacks
            if callable(method := getattr(callback, hook, None))
        ]
        told += [lambda function=function: function(hook, event) for function in self._functions]
        for tell in told:
            try:
                tell()
            except Exception:
                log.exception("a failure callback raised in %s; the training goes on", hook)
