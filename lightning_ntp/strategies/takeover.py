"""The leader's duties: loggers and the progress bar, and how they move when the leader dies or leaves.

Lightning logs in the process whose rank is zero. Every member calls ``log_metrics``, and on the others it does nothing.
So each member keeps the newest calls, and a new leader adds what the old one had no time to write, and leaves out what
it had already written. ModelCheckpoint and EarlyStopping have the same state on all members and need nothing.

What a user sends past ``log_metrics``, straight to ``logger.experiment``, is not kept: it stops and goes on with the
leader, so a point of the last step may be missing.
"""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from numbers import Number
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor

from lightning_ntp.compat import loggers as compat
from lightning_ntp.strategies.logger_adapters import ADAPTERS, Call, LoggerAdapter, Mark

WINDOW = 512  # calls that a member keeps
_HPARAMS_CALLS = 8


def compare(
    calls: list[Call], written: list[Mark], marks: Callable[[Call], dict[Mark, list[str]]]
) -> tuple[list[Call], Counter[Mark]]:
    """What the old leader did not write of a member's calls, and what it wrote ahead of them.

    Both made the same calls in the same order (the old leader made some of its own, too), so all calls before one that
    is there are there.

    Args:
        calls: This member's newest, oldest first.
        written: The old leader's newest marks, oldest first.
        marks: Of a call.

    Returns:
        The missing calls, oldest first, and the marks that were written ahead, with their number.
    """
    mine = Counter(mark for call in calls for mark in marks(call))
    excess = Counter(written) - mine
    ahead: Counter[Mark] = Counter()
    for mark in reversed(written):
        if excess[mark] <= 0:
            break
        excess[mark] -= 1
        ahead[mark] += 1
    left = Counter(written) - ahead
    missing: list[Call] = []
    for call in calls:
        lacking = [name for mark, names in marks(call).items() if left[mark] <= 0 for name in names]
        left.subtract(marks(call).keys())
        if lacking:
            missing.append(Call({name: call.metrics[name] for name in lacking}, call.step))
        else:
            missing.clear()  # what seemed to lack before it is only older than ``written``
    return missing, ahead


class Mirror:
    """Sees the calls of one logger, on every member.

    Args:
        adapter: Of the logger.
        window: Number of calls that are kept.
    """

    def __init__(self, adapter: LoggerAdapter, window: int) -> None:
        self.adapter = adapter
        self._calls: deque[Call] = deque(maxlen=window)
        self._hparams: deque[tuple[tuple, dict]] = deque(maxlen=_HPARAMS_CALLS)
        self._ahead: Counter[Mark] = Counter()
        self._num_calls = self._num_flushed = 0
        self._is_stopped = False
        _detach(adapter.logger)
        self._log_metrics, self._log_hyperparams = adapter.logger.log_metrics, adapter.logger.log_hyperparams
        adapter.logger.log_metrics = self.log_metrics
        adapter.logger.log_hyperparams = self.log_hyperparams

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """In the place of the logger's own. Calls without a step are passed on only."""
        if step is not None:
            call = Call({name: _kept(value) for name, value in metrics.items() if _is_scalar(value)}, step)
            self._calls.append(call)
            self._num_calls += 1
            if self._ahead and not (metrics := self._without_ahead(metrics, call)):
                return
        if not self._is_stopped:
            self._log_metrics(metrics=metrics, step=step, **kwargs)

    def _without_ahead(self, metrics: Mapping[str, Any], call: Call) -> dict[str, Any]:
        marks = self.adapter.marks(call)
        there = [mark for mark in marks if self._ahead[mark] > 0]
        self._ahead -= Counter(there)
        names = {name for mark in there for name in marks[mark]}
        return {name: value for name, value in metrics.items() if name not in names}

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """In the place of the logger's own."""
        self._hparams.append((args, kwargs))
        if not self._is_stopped:
            self._log_hyperparams(*args, **kwargs)

    def flush(self) -> None:
        """All members have made all calls up to here."""
        self._num_flushed = self._num_calls
        if rank_zero_only.rank == 0 and not self._is_stopped:
            self.adapter.flush()

    def take_over(self, checkpoints: list[ModelCheckpoint]) -> None:
        """Go on where the old leader's logger stopped."""
        self.adapter.take_over()
        if self.adapter.lacks_hyperparams():
            for args, kwargs in self._hparams:
                self._log_hyperparams(*args, **kwargs)
        for call in self._missing():
            self._log_metrics(metrics={name: _number(value) for name, value in call.metrics.items()}, step=call.step)
        self.adapter.logger.save()
        self.adapter.upload_at_end(checkpoints)

    def _missing(self) -> list[Call]:
        calls, written = list(self._calls), self.adapter.written()
        if written is None:
            return self.adapter.doubtful(calls, min(len(calls), self._num_calls - self._num_flushed))
        if not written and self._num_calls > len(calls):
            rank_zero_warn(
                f"the old leader's {type(self.adapter.logger).__name__} has left nothing here (is its folder on "
                f"another machine?): only its last {len(calls)} calls are written again"
            )
        missing, self._ahead = compare(calls, written, self.adapter.marks)
        return missing

    def stop(self) -> None:
        """The logger has failed, or is another's now: it is called no more."""
        self._is_stopped = True
        for name in ("save", "finalize", "log_graph", "after_save_checkpoint"):
            setattr(self.adapter.logger, name, _do_nothing)

    def close(self) -> None:
        """Give the logger its methods back, unless it was stopped."""
        if not self._is_stopped:
            _detach(self.adapter.logger)


class LeaderDuties:
    """What the leader does for all members, and how it moves. Made on every member when a fit is set up.

    Args:
        trainer: Its loggers are watched until ``close``.
        adapters: More (or other) kinds of loggers.
        window: Calls of each logger that a member keeps.
    """

    def __init__(
        self, trainer: Trainer, adapters: Mapping[type, type[LoggerAdapter]] | None = None, window: int = WINDOW
    ) -> None:
        self._trainer = trainer
        kinds = (*(adapters or {}).items(), *ADAPTERS)
        loggers = [logger for logger in trainer.loggers if not isinstance(logger, DummyLogger)]
        loggers.sort(key=lambda logger: not isinstance(logger, WandbLogger))  # before a TensorBoard writer it copies
        self._mirrors = [Mirror(_adapter_of(logger, kinds), window) for logger in loggers]
        self._adopted: list[Any] | None = None

    def share(self, broadcast: Callable[[Any], Any]) -> None:
        """Let all members know where the leader logs. A collective, at the end of the setup.

        Args:
            broadcast: Gives every member the leader's object.
        """
        state = None
        while state is None:  # a leader that dies here has told nothing: then another one leads
            leads = rank_zero_only.rank == 0
            if leads:
                self._lead()
            state = broadcast(self.state() if leads else None)
        if rank_zero_only.rank != 0:
            self.adopt(state)

    def _lead(self) -> None:
        for mirror in self._mirrors:
            mirror.adapter.lead()
        unknown = [type(m.adapter.logger).__name__ for m in self._mirrors if type(m.adapter) is LoggerAdapter]
        if unknown:
            rank_zero_warn(
                f"what {' and '.join(unknown)} writes may stop if the leader dies: lightning_ntp does not know how to "
                "move it to another process. Give the logger a method ntp_adapter() that returns a LoggerAdapter"
            )

    def state(self) -> list[Any]:
        """Where the leader logs, for ``adopt`` (it can be pickled). Any member knows it once it was shared."""
        if self._adopted is not None:
            return self._adopted
        return [mirror.adapter.state() for mirror in self._mirrors]

    def adopt(self, state: list[Any]) -> None:
        """Keep the leader's ``state``."""
        self._adopted = state
        for mirror, each in zip(self._mirrors, state, strict=True):
            mirror.adapter.adopt(each)

    def flush(self) -> None:
        """After every step that all members have ended, on all of them: what the leader has logged outlives it."""
        for mirror in self._mirrors:
            mirror.flush()

    def take_over(self) -> None:
        """This member has become the leader. No collective may be under way, and none is run.

        A logger or a progress bar that cannot go on gives a warning: it is not worth the training.
        """
        checkpoints = [each for each in self._trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
        for mirror in self._mirrors:
            if not _try(f"{type(mirror.adapter.logger).__name__} does not go on", mirror.take_over, checkpoints):
                mirror.stop()
        _try("the progress bar does not go on", compat.start_progress_bar, self._trainer)
        compat.restart_throughput(self._trainer)

    def hand_over(self) -> None:
        """This member lives, but leads no more: close what the new leader opens. Before that one's ``take_over``."""
        for mirror in self._mirrors:
            _try(f"{type(mirror.adapter.logger).__name__} was not closed", mirror.adapter.hand_over)
            mirror.stop()  # what this member still logs on its way out is not its business
        compat.stop_progress_bar(self._trainer)

    def close(self) -> None:
        """Give the loggers their methods back, at the end of the fit."""
        for mirror in self._mirrors:
            mirror.close()


def _adapter_of(logger: Logger, kinds: Iterable[tuple[type, type[LoggerAdapter]]]) -> LoggerAdapter:
    if hasattr(type(logger), "ntp_adapter"):
        return logger.ntp_adapter()
    return next((adapter for kind, adapter in kinds if isinstance(logger, kind)), LoggerAdapter)(logger)


def _detach(logger: Logger) -> None:
    for name in ("log_metrics", "log_hyperparams"):
        vars(logger).pop(name, None)


def _try(problem: str, function: Callable[..., None], *arguments: Any) -> bool:
    try:
        function(*arguments)
    except Exception as error:  # a server that does not answer, a full disk, a bug in a user's logger
        warnings.warn(f"{problem} after the leader has changed: {error!r}", stacklevel=3)
        return False
    return True


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (Number, str)) or (isinstance(value, Tensor) and value.numel() == 1)


def _kept(value: Any) -> Any:
    # Not .item(): it would wait for the device on every member.
    return value.detach().clone() if isinstance(value, Tensor) else value


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _do_nothing(*_: Any, **__: Any) -> None:
    pass
