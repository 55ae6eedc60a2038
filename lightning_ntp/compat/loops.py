"""Private attributes of Lightning's loops and Trainer that recovery uses: one small function each.

Each looks for its attribute when it is called and says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import RunningStage

from lightning_ntp.compat.lightning import logged_results, private
from lightning_ntp.compat.torchmetrics import metric_snapshot, restore_metric
from lightning_ntp.errors import UnsupportedError

# Hooks around a step: they are not run again with it, so what they log stays.
_AROUND_THE_STEP = ("on_train_batch_start.", "on_train_batch_end.", "on_train_epoch_start.", "on_train_start.")

# By its folder a ModelCheckpoint tells whether a saved state is its own; by the others, whether to save or to link.
_UNSAVED = ("dirpath", "_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")

_WRAPPED = (
    ("fit_loop.epoch_loop.automatic_optimization", "run"),
    ("fit_loop.epoch_loop.manual_optimization", "run"),
    ("fit_loop.epoch_loop", "_broadcast_sigterm_tensor"),
    ("fit_loop.epoch_loop", "run"),
    ("fit_loop.epoch_loop.val_loop", "setup_data"),
    ("_data_connector", "prepare_data"),
    ("_checkpoint_connector", "resume_start"),
    ("_signal_connector", "_sigterm_notifier_fn"),
    ("", "save_checkpoint"),
    ("", "_run_stage"),
)


def wrap(trainer: Any, path: str, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put ``around(method)`` in the place of a method, on this one object. Undone by ``unwrap``.

    Args:
        trainer: The Trainer.
        path: Attributes from the Trainer to the object; empty for the Trainer itself.
        name: Of the method; the pair must be one of those that are known here.

    Raises:
        UnsupportedError: if this version of Lightning has no such method.
    """
    assert (path, name) in _WRAPPED, (path, name)
    target = _follow(trainer, path)
    method = getattr(target, name, None)
    if not callable(method):
        where = f"Trainer.{path}" if path else "Trainer"
        raise UnsupportedError(f"lightning {lightning.__version__} has no method {where}.{name}")
    setattr(target, name, around(method))


def unwrap(trainer: Any) -> None:
    """Give all objects their own methods back."""
    for path, name in _WRAPPED:
        vars(_follow(trainer, path)).pop(name, None)


def progress_snapshot(trainer: Any) -> Callable[[], None]:
    """A function that puts the loops' counters of a step back."""
    loop = _follow(trainer, "fit_loop.epoch_loop")
    trackers = [loop.automatic_optimization.optim_progress, loop.manual_optimization.optim_step_progress]
    states = [tracker.state_dict() for tracker in trackers]

    def restore() -> None:
        for tracker, state in zip(trackers, states, strict=True):
            tracker.load_state_dict(state)

    return restore


def results_snapshot(trainer: Any) -> Callable[[], None]:
    """A function that puts back what ``self.log`` has collected from steps; a key that came since is dropped."""
    results = logged_results(trainer)
    states = {key: metric_snapshot(metric) for key, metric in results.items()}
    connector, module = trainer._logger_connector, trainer.lightning_module
    names = connector._current_fx, module._current_fx_name

    def restore() -> None:
        for key in [key for key in results if not key.startswith(_AROUND_THE_STEP)]:
            if key in states:
                restore_metric(results[key], states[key])
            else:
                del results[key]
        # Hooks that an error has left by surprise leave their names behind.
        connector._current_fx, module._current_fx_name = names

    return restore


def toggled_snapshot(module: Any) -> Callable[[], None]:
    """A function that puts ``requires_grad`` back, with what ``toggle_optimizer`` has noted of it."""
    flags = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    noted = dict(getattr(module, "_param_requires_grad_state", {}))

    def restore() -> None:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        module._param_requires_grad_state = dict(noted)

    return restore


def note_sigterm(trainer: Any) -> None:
    """Let the Trainer know that it stops because of SIGTERM."""
    _follow(trainer, "_signal_connector.received_sigterm")
    trainer._signal_connector.received_sigterm = True


def dump_checkpoint(trainer: Any) -> dict[str, Any]:
    """What Lightning would save now, from the strategy's states to the callbacks'."""
    return _follow(trainer, "_checkpoint_connector.dump_checkpoint")(weights_only=False)


def restore_from(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Let this run start from a checkpoint that is in memory, whatever ``ckpt_path`` says."""
    connector = _follow(trainer, "_checkpoint_connector")
    _follow(connector, "_loaded_checkpoint")
    wrap(trainer, "_checkpoint_connector", "resume_start", lambda _: lambda *args, **kwargs: None)
    connector._loaded_checkpoint = checkpoint


def unsaved_of_checkpoints(trainer: Any) -> dict[str, dict[str, Any]]:
    """What each ModelCheckpoint decides by and does not save, by the callback's key."""
    known = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    return {callback.state_key: {name: _follow(callback, name) for name in _UNSAVED} for callback in known}


def set_unsaved_of_checkpoints(trainer: Any, unsaved: dict[str, dict[str, Any]]) -> None:
    """Let each ModelCheckpoint decide as the one that ``unsaved`` comes from."""
    for callback in trainer.checkpoint_callbacks:
        vars(callback).update(unsaved.get(callback.state_key, {}))


def forbid_saving_on_exception(trainer: Any) -> bool:
    """Let no ModelCheckpoint save on an exception; returns whether one would have."""
    known = [c for c in trainer.checkpoint_callbacks if getattr(c, "save_on_exception", False)]
    for callback in known:
        callback.save_on_exception = False
    return bool(known)


def callback_metrics(trainer: Any) -> dict[str, Any]:
    """What ``callback_metrics`` has now, without any exchange."""
    metrics = _follow(trainer, "_logger_connector._callback_metrics")
    return {name: value.detach().cpu() for name, value in metrics.items()}


def set_callback_metrics(trainer: Any, metrics: dict[str, Any]) -> None:
    """Let the Trainer's ``callback_metrics`` begin with these values."""
    _follow(trainer, "_logger_connector._callback_metrics").update(metrics)


@dataclass(frozen=True)
class LoopFacts:
    """What a checkpoint of the loops does not say, or does not say exactly, in the middle of an epoch.

    Attributes:
        stepped: Count of optimizer steps by which loggers are called.
        ready: Micro-batches of all epochs, the one in hand included.
        reloaded: Epochs in which the training and the validation loader were made last.
        validates: Whether the validation loader is there.
    """

    stepped: int
    ready: int
    reloaded: tuple[float, float]
    validates: bool

    @classmethod
    def of(cls, trainer: Any) -> LoopFacts:
        loop = trainer.fit_loop
        return cls(
            _follow(loop, "epoch_loop._batches_that_stepped"),
            _follow(loop, "epoch_loop.batch_progress.total.ready"),
            (loop._last_train_dl_reload_epoch, _follow(loop, "epoch_loop.val_loop._last_val_dl_reload_epoch")),
            _follow(loop, "epoch_loop.val_loop._combined_loader") is not None,
        )

    def prepare(self, trainer: Any) -> None:
        """On a joiner, before its loop runs: loaders are made when the others make theirs, or have been."""
        loop = trainer.fit_loop
        val_loop = loop.epoch_loop.val_loop
        if self.validates:
            trainer.validating = True
            val_loop.setup_data()
            trainer.training = True
        else:  # the loop would make it at its start, alone; the others will, later and together
            wrap(trainer, "fit_loop.epoch_loop.val_loop", "setup_data", lambda _: lambda: None)
        loop._last_train_dl_reload_epoch, val_loop._last_val_dl_reload_epoch = self.reloaded

    def settle(self, trainer: Any) -> None:
        """On a joiner at its first step: undo what a restart changes on the way."""
        loop = trainer.fit_loop.epoch_loop
        vars(loop.val_loop).pop("setup_data", None)
        loop._batches_that_stepped = self.stepped
        total = loop.batch_progress.total
        total.ready = total.started = self.ready
        # Not the epoch's first batch: there the first ``self.log`` resets what was logged before.
        _follow(trainer, "_logger_connector._first_loop_iter")
        trainer._logger_connector._first_loop_iter = False


def set_up_training_data(trainer: Any) -> None:
    """Make the training loader now, as the fit loop would at its start."""
    trainer.fit_loop.setup_data()


def refresh_train_length(trainer: Any, length: int | None, at_start: bool = False) -> None:
    """Tell the training loop that its epoch has another number of micro-batches than it was told at first.

    Args:
        trainer: The Trainer, fitting.
        length: Micro-batches of the whole epoch, those behind included; ``None`` if nobody knows.
        at_start: Whether the epoch has not begun: then the batches at which validation runs follow, too.
    """
    loop = trainer.fit_loop
    fetcher, combined = getattr(loop, "_data_fetcher", None), getattr(loop, "_combined_loader", None)
    if length is None or fetcher is None or combined is None or loop.max_batches == float("inf"):
        return
    limited = _num_batches(loop.epoch_loop, length, trainer.limit_train_batches)
    interval = trainer.val_check_interval
    if at_start and isinstance(interval, float) and trainer.val_check_batch not in (None, float("inf")):
        trainer.val_check_batch = max(1, int(limited * interval))
    elif trainer.val_check_batch == loop.max_batches and not isinstance(interval, int):
        trainer.val_check_batch = limited
    if loop.max_batches == limited:
        return
    loop.max_batches = limited
    combined.limits = [limited]
    fetcher.length = limited
    if loop.epoch_loop.batch_progress.is_last_batch and fetcher.fetched < limited and not at_start:
        loop.epoch_loop.batch_progress.is_last_batch = fetcher.done = False


def refresh_evaluation_lengths(trainer: Any) -> None:
    """Tell evaluation loops how long their next pass is; one under way keeps its length.

    Args:
        trainer: The Trainer.
    """
    loops = {"val": (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop), "test": (trainer.test_loop,)}
    for name, of_stage in loops.items():
        for loop in of_stage:
            combined = _follow(loop, "_combined_loader")
            if combined is not None and _follow(loop, "_max_batches"):
                limit = getattr(trainer, f"limit_{name}_batches")
                loop._max_batches = [
                    _num_batches(loop, length, limit) if (length := sized_len(loader)) is not None else before
                    for loader, before in zip(combined.flattened, loop._max_batches, strict=True)
                ]


def _num_batches(loop: Any, length: int, limit: Any) -> Any:
    stage = getattr(loop, "_stage", RunningStage.TRAINING)
    return private("lightning.pytorch.trainer.connectors.data_connector", "_parse_num_batches")(stage, length, limit)


def _follow(start: Any, path: str) -> Any:
    target = start
    for name in path.split(".") if path else ():
        if not hasattr(target, name):
            where = f"{type(start).__name__}.{path}"
            raise UnsupportedError(f"lightning {lightning.__version__} has no {where}, which recovery needs")
        target = getattr(target, name)
    return target
