"""Private attributes of Lightning that this package uses: one small function each.

Each looks for its attribute when it is called and says what is missing; no other file touches a name of Lightning that
begins with an underscore.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning
import torch

from lightning_ntp.errors import UnsupportedError


def private(module: str, name: str) -> Any:
    """An attribute of one of Lightning's modules.

    Raises:
        UnsupportedError: if this version of Lightning does not have it.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"lightning {lightning.__version__} has no {module}.{name}, which lightning_ntp needs: install a version "
            "of lightning inside the range that this package declares"
        ) from error


# Launching


def subprocess_script_launcher() -> type:
    """The base class of our launcher; the Trainer treats launchers of this class as ones that own processes."""
    return private("lightning.pytorch.strategies.launchers.subprocess_script", "_SubprocessScriptLauncher")


def script_command() -> list[str]:
    """The command line that runs this process's script (or ``-m`` module) again."""
    command = list(private("lightning.fabric.strategies.launchers.subprocess_script", "_basic_subprocess_cmd")())
    import __main__  # here, as it may be replaced between import and launch

    if __main__.__spec__ is None:
        command[1] = __main__.__file__  # always absolute; Lightning's is wrong once the script has changed directory
    return command


def hydra_script_command(local_rank: int) -> tuple[list[str], str]:
    """The same for a Hydra job that has been started, with the job's overrides; and the directory to run it in."""
    build = private("lightning.fabric.strategies.launchers.subprocess_script", "_hydra_subprocess_cmd")
    command, working_directory = build(local_rank=local_rank)
    return list(command), working_directory


def limit_threads(num_processes: int) -> None:
    """Give this process its share of the CPUs, unless OMP_NUM_THREADS says something else."""
    private("lightning.fabric.utilities.distributed", "_set_num_threads_if_needed")(num_processes=num_processes)


# Setting up


def materialize(module: torch.nn.Module, device: torch.device) -> None:
    """Give memory and initial values to parameters on the meta device."""
    private("lightning.fabric.utilities.init", "_materialize_distributed_module")(module, device)


def keep_samplers(trainer: Any) -> None:
    """Stop the Trainer from putting its own distributed sampler into the user's loaders: they are cut by shares."""
    connector = getattr(trainer, "_accelerator_connector", None)
    if not hasattr(connector, "use_distributed_sampler"):
        raise UnsupportedError(f"lightning {lightning.__version__} has no Trainer switch for its distributed sampler")
    connector.use_distributed_sampler = False


def logs_graph(logger: Any) -> bool:
    """Whether a logger will run the model to draw its graph."""
    return bool(getattr(logger, "_log_graph", False))


def syncs_batch_norm(strategy: Any) -> bool:
    """Whether the Trainer was given ``sync_batchnorm=True``, which it keeps on the strategy."""
    return getattr(strategy, "_layer_sync", None) is not None


# Running


def active_loaders(trainer: Any) -> list[Any]:
    """The loaders of the loop that runs now, in the order of their index; empty outside of loops."""
    loop = getattr(trainer, "_active_loop", None)
    combined = getattr(loop, "_combined_loader", None)
    return [] if combined is None else list(combined.flattened)


def logged_results(trainer: Any) -> dict[str, Any]:
    """What ``self.log`` has collected in the loop that runs now, by key."""
    return {} if trainer._results is None else trainer._results


def wrap_automatic_optimization(trainer: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put ``wrap(run)`` in the place of ``run``, which runs one micro-batch under automatic optimization.

    Only on this Trainer's loop object. Undone by ``unwrap_automatic_optimization``.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    if not callable(getattr(loop, "run", None)) or not callable(getattr(loop, "_make_closure", None)):
        raise UnsupportedError(f"lightning {lightning.__version__} runs automatic optimization in another way")
    loop.run = wrap(loop.run)


def unwrap_automatic_optimization(trainer: Any) -> None:
    """Give the loop its own ``run`` back."""
    vars(trainer.fit_loop.epoch_loop.automatic_optimization).pop("run", None)


def automatic_pass(trainer: Any, optimizer: Any, batch_idx: int, kwargs: OrderedDict) -> Callable[[], Any]:
    """Forward and backward of one more batch under automatic optimization, without an optimizer step."""
    return trainer.fit_loop.epoch_loop.automatic_optimization._make_closure(kwargs, optimizer, batch_idx)


def zero_grad_progress(trainer: Any) -> Any:
    """The loop's counter of ``zero_grad`` calls."""
    return trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.zero_grad


def batch_on_device(trainer: Any, batch: Any) -> Any:
    """A batch as the training loop hands it to ``training_step``."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return private("lightning.pytorch.trainer.call", "_call_strategy_hook")(
        trainer, "batch_to_device", batch, dataloader_idx=0
    )


@contextmanager
def logging_for(trainer: Any, batch: Any) -> Iterator[None]:
    """Let ``self.log`` find its batch size in ``batch`` instead of the loop's own batch."""
    results = trainer._results
    before = results.batch, results.batch_size
    results.batch, results.batch_size = batch, None
    try:
        yield
    finally:
        results.batch, results.batch_size = before
