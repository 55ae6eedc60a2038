"""How each kind of logger goes on in another process: W&B, CSV, TensorBoard and MLflow.

A logger that this file does not know can bring a ``LoggerAdapter`` of its own:

    class MyLogger(Logger):
        def ntp_adapter(self):
            return MyAdapter(self)
"""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from typing_extensions import override

from lightning_ntp.compat import loggers as compat

Mark = tuple[Any, ...]  # what tells one written thing from all others: a step and the names of its values

_WANDB_DOUBT_S = 30.0


@dataclass
class Call:
    """One call of ``log_metrics``, or what is missing of it.

    Attributes:
        metrics: Numbers, strings and one-element tensors by name; nothing else is kept.
        step: As given.
        time_s: When, by the monotonic clock.
    """

    metrics: dict[str, Any]
    step: int
    time_s: float = field(default_factory=time.monotonic)


class LoggerAdapter:
    """How a kind of logger goes on in another process. The base is for loggers of which nothing is known.

    No method may run a collective. ``rank_zero_only.rank`` is 0 in those that the leader calls.

    Args:
        logger: The Trainer's.
    """

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def state(self) -> Any:
        """On the leader: what another process needs to go on in the same place (it is pickled)."""
        return compat.place(self.logger)

    def adopt(self, state: Any) -> None:
        """On the other members: keep what ``state`` gave."""
        compat.set_place(self.logger, state)

    def lead(self) -> None:
        """On the leader, when a fit is set up."""

    def flush(self) -> None:
        """On the leader, after every step: what was logged must outlive a kill. Called often."""

    def take_over(self) -> None:
        """On the new leader: open the old leader's run or files."""

    def hand_over(self) -> None:
        """On a leader that leaves: close them, so that the new one can open them. Its rank may no longer be 0."""

    def lacks_hyperparams(self) -> bool:
        """On the new leader: whether the calls of ``log_hyperparams`` are to be repeated."""
        return False

    def upload_at_end(self, checkpoints: list[ModelCheckpoint]) -> None:
        """On the new leader: these callbacks have saved files that the old leader may not have uploaded."""

    def marks(self, call: Call) -> dict[Mark, list[str]]:
        """What a call writes, with the names of its metrics."""
        return {(str(call.step), name): [name] for name in call.metrics}

    def written(self) -> list[Mark] | None:
        """On the new leader: the newest marks that the old one wrote, oldest first; None if that can't be told."""
        return None

    def doubtful(self, calls: list[Call], unflushed: int) -> list[Call]:
        """Where ``written`` can't tell: the calls to repeat.

        Args:
            calls: The newest, oldest first.
            unflushed: How many of them came after the last step that all members have ended.
        """
        return []


class CSVAdapter(LoggerAdapter):
    """``metrics.csv``.

    The leader writes every row at once; members do not keep the whole file. A row costs 55 us, which the Trainer spends
    anyway, as it saves after each of its own calls. Only rows of direct calls, as of LearningRateMonitor, may wait.
    """

    @override
    def lead(self) -> None:
        compat.keep_rows(self.logger)

    @override
    def flush(self) -> None:
        if getattr(self.logger.experiment, "metrics", True):
            self.logger.save()

    @override
    def take_over(self) -> None:
        self._rows = compat.open_rows(self.logger)

    @override
    def lacks_hyperparams(self) -> bool:
        return True  # the writer holds them, and writes the whole file when more come

    @override
    def hand_over(self) -> None:
        compat.save_rows(self.logger)

    @override
    def marks(self, call: Call) -> dict[Mark, list[str]]:
        # A row is there or not: one mark.
        names = [name for name, value in call.metrics.items() if name != "step" and not _is_empty(value)]
        return {(str(call.step), frozenset(compat.prefixed(self.logger, name) for name in names)): list(call.metrics)}

    @override
    def written(self) -> list[Mark]:
        return [
            (row["step"], frozenset(name for name, value in row.items() if value and name != "step"))
            for row in self._rows
        ]


class TensorBoardAdapter(LoggerAdapter):
    """Events files: the new leader begins one of its own in the same folder."""

    @override
    def adopt(self, state: Any) -> None:
        compat.import_tensorboard()  # takes a second: now, not while all wait for the new leader
        super().adopt(state)

    @override
    def flush(self) -> None:
        self.logger.experiment.flush()  # 2 us when nothing waits

    @override
    def take_over(self) -> None:
        self._points = compat.written_points(self.logger)
        compat.await_later_name(self.logger)
        _ = self.logger.experiment

    @override
    def hand_over(self) -> None:
        if (writer := compat.forget_experiment(self.logger)) is not None:
            writer.close()

    @override
    def lacks_hyperparams(self) -> bool:
        # They are written together with a metric at step 0, which would be there twice.
        return not compat.has_file(self.logger, self.logger.NAME_HPARAMS_FILE)

    @override
    def marks(self, call: Call) -> dict[Mark, list[str]]:
        return {(call.step, compat.prefixed(self.logger, name)): [name] for name in call.metrics}

    @override
    def written(self) -> list[Mark]:
        return list(self._points)


class WandbAdapter(LoggerAdapter):
    """The same W&B run, resumed by its id. Offline it has a second folder of the same id.

    W&B's service dies with the leader and what it has not yet written or sent (by default every 15 s, each) with it.
    So the calls of the last 30 s are repeated: some points come twice, at the same ``trainer/global_step``.
    """

    @override
    def state(self) -> Any:
        return compat.wandb_run(self.logger)

    @override
    def adopt(self, state: Any) -> None:
        importlib.import_module("wandb")  # now, as above
        compat.set_wandb_run(self.logger, state)

    @override
    def take_over(self) -> None:
        _ = self.logger.experiment

    @override
    def lacks_hyperparams(self) -> bool:
        return True

    @override
    def hand_over(self) -> None:
        if (run := compat.forget_experiment(self.logger)) is not None:
            run.finish()

    @override
    def upload_at_end(self, checkpoints: list[ModelCheckpoint]) -> None:
        compat.upload_at_end(self.logger, checkpoints)

    @override
    def doubtful(self, calls: list[Call], unflushed: int) -> list[Call]:
        since = time.monotonic() - _WANDB_DOUBT_S
        return [call for call in calls if call.time_s > since]


class MLflowAdapter(LoggerAdapter):
    """The same MLflow run.

    A call has stored its values when it returns. So only calls that the old leader may not have made are repeated; one
    that it had made is there twice, with the same step and value.
    """

    @override
    def state(self) -> Any:
        return compat.mlflow_run(self.logger)

    @override
    def adopt(self, state: Any) -> None:
        importlib.import_module("mlflow")  # now, as above
        compat.set_mlflow_run(self.logger, state)

    @override
    def take_over(self) -> None:
        _ = self.logger.experiment

    @override
    def lacks_hyperparams(self) -> bool:
        return True  # the same values again are no error

    @override
    def upload_at_end(self, checkpoints: list[ModelCheckpoint]) -> None:
        compat.upload_at_end(self.logger, checkpoints)

    @override
    def doubtful(self, calls: list[Call], unflushed: int) -> list[Call]:
        return calls[len(calls) - unflushed :]


ADAPTERS: tuple[tuple[type, type[LoggerAdapter]], ...] = (
    (WandbLogger, WandbAdapter),
    (CSVLogger, CSVAdapter),
    (TensorBoardLogger, TensorBoardAdapter),
    (MLFlowLogger, MLflowAdapter),
)


def _is_empty(value: Any) -> bool:
    return isinstance(value, str) and not value
