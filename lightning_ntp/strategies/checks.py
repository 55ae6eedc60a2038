"""What does not work with nonuniform tensor parallelism is refused at start, with the way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch import callbacks
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from lightning_ntp.compat import lightning as compat
from lightning_ntp.compat.torch import is_compiled_in_place
from lightning_ntp.config import NTPConfig
from lightning_ntp.errors import NTPError, UnsupportedError
from lightning_ntp.parallel import ParallelModel, check_partial_grads, refuse_distributed

SUPPORTED_PRECISION = ("32-true", "64-true", "bf16-mixed", "bf16-true")

_AVERAGING = (callbacks.StochasticWeightAveraging, callbacks.WeightAveraging)

# Updates of these are not elementwise: a slot would need the whole matrix, or steps several times on one gradient.
_NOT_ELEMENTWISE = (
    "Adafactor", "Muon", "LBFGS", "SparseAdam", "LAMB", "Lamb", "LARS", "Lars", "Shampoo", "SOAP", "KFAC", "GaLore",
    "Prodigy", "DAdapt", "NovoGrad", "AdamP", "SGDP", "Ranger", "CAME", "APOLLO", "8bit",
)  # fmt: skip


def check_precision(plugin: Precision) -> None:
    """Refuse precisions whose state would differ between slots.

    Raises:
        UnsupportedError: for anything but 32-true, 64-true, bf16-mixed and bf16-true.
    """
    name = getattr(plugin, "precision", type(plugin).__name__)
    known = type(plugin) in (Precision, DoublePrecision, HalfPrecision, MixedPrecision)
    if known and name in SUPPORTED_PRECISION:
        return
    if str(name).startswith("16"):
        reason = "float16 needs a loss scaler that all members agree on"
    else:
        reason = "it replaces layers or keeps state that is not sharded"
    raise UnsupportedError(
        f"precision={name!r} is not supported: {reason}; choose one of {', '.join(map(repr, SUPPORTED_PRECISION))}"
    )


def check_callbacks(installed: Sequence[Any]) -> None:
    """Refuse callbacks that keep a second copy of the weights, or change the number of micro-batches.

    Raises:
        UnsupportedError: names the callback.
    """
    for callback in installed:
        if isinstance(callback, _AVERAGING) or "EMA" in type(callback).__name__:
            raise UnsupportedError(
                f"callback {type(callback).__name__} copies the whole model, but every member holds only its part: "
                "remove it and average saved checkpoints instead"
            )
        if isinstance(callback, callbacks.GradientAccumulationScheduler):
            raise UnsupportedError(
                "callback GradientAccumulationScheduler is not supported: shares are dealt for one number of "
                "micro-batches; use Trainer(accumulate_grad_batches=...)"
            )


def check_optimizers(optimizers: Sequence[Optimizer], module: nn.Module) -> None:
    """Refuse optimizers that need whole matrices, and parameters that are no part of the model.

    Raises:
        UnsupportedError: names the optimizer or the parameter group.
    """
    known = set(module.parameters())
    for number, optimizer in enumerate(optimizers):
        name = type(optimizer).__name__
        if any(word in name for word in _NOT_ELEMENTWISE):
            raise UnsupportedError(
                f"optimizer {number} is a {name}, whose update of one element depends on others: on a slot's part of a "
                "matrix it would be silently wrong; use AdamW, Adam, SGD or another elementwise optimizer"
            )
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter not in known:
                    raise UnsupportedError(
                        f"optimizer {number} ({name}), parameter group {index}: a parameter of shape "
                        f"{tuple(parameter.shape)} is no part of the model after sharding; build the optimizer in "
                        "configure_optimizers from self.parameters(), and register every parameter in the module"
                    )


def check_trainer(trainer: Any) -> None:
    """Refuse Trainer options that cannot work.

    Raises:
        UnsupportedError: names the option.
    """
    check_callbacks(trainer.callbacks)
    for logger in trainer.loggers:
        if compat.logs_graph(logger):
            raise UnsupportedError(
                f"{type(logger).__name__}(log_graph=True) is not supported: the leader alone would run the forward and "
                "wait for the other members; drop log_graph"
            )
    if compat.syncs_batch_norm(trainer.strategy):
        raise UnsupportedError("sync_batchnorm=True is not supported: its groups would count every slot of a replica")


def warn_of_single_replica(num_replicas: int) -> None:
    """One replica has no peer that holds the same weights."""
    if num_replicas == 1:
        rank_zero_warn(
            "data_parallel_size=1: with a single replica nobody else holds a member's part of the model, so a sudden "
            "loss cannot be recovered from a peer, only from a checkpoint; use two replicas or more"
        )


def check_graph(loss: Tensor, model: ParallelModel) -> None:
    """Refuse what only the graph of a loss shows, before its backward.

    Raises:
        PlanError: if the plan is wrong about where a replicated parameter is used.
        UnsupportedError: for reentrant activation checkpointing.
    """
    check_no_reentrant_checkpointing(loss)
    check_partial_grads(loss, model)


def check_no_reentrant_checkpointing(loss: Tensor) -> None:
    """Refuse reentrant activation checkpointing: its inner backward passes end in the middle of the outer one.

    Raises:
        UnsupportedError: if the loss's graph contains one.
    """
    seen: set[Any] = set()
    pending = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise UnsupportedError(
                "reentrant activation checkpointing is not supported: gradients would be synced in the middle of a "
                "backward pass; call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        pending.extend(edge for edge, _ in node.next_functions)


def check_unsharded(module: nn.Module) -> None:
    """Refuse what cannot be sharded: DTensors, compiled parts (Lightning refuses a compiled root), copies of weights.

    Raises:
        UnsupportedError: names the module.
    """
    refuse_distributed(module)
    for name, part in module.named_modules():
        if is_compiled_in_place(part):
            raise UnsupportedError(
                f"module {name or 'model'!r} was compiled by its compile(), which is not supported: the parallel "
                "layers' collectives are not traced; leave it plain"
            )
        if isinstance(part, AveragedModel):
            raise UnsupportedError(
                f"module {name!r} is an AveragedModel, a copy of the whole model, but every member holds only its "
                "part: remove it and average saved checkpoints instead"
            )


def check_all_gather(sync_grads: bool, is_alone: bool) -> None:
    """Refuse what ``LightningModule.all_gather`` cannot do here.

    Raises:
        UnsupportedError: names the argument.
    """
    if sync_grads:
        raise UnsupportedError(
            "all_gather(sync_grads=True) is not supported: every slot of a replica would send its gradient; gather "
            "without it, and let gradients flow through this replica's own values only"
        )
    if is_alone:
        raise UnsupportedError(
            "all_gather in training_step with max_micro_batch is not supported: replicas run different numbers of "
            "passes; gather in another hook or drop max_micro_batch"
        )


def check_manual_optimization(config: NTPConfig) -> None:
    """Refuse what needs automatic optimization.

    Raises:
        UnsupportedError: names the argument.
    """
    if config.max_micro_batch is not None:
        raise UnsupportedError(
            f"max_micro_batch={config.max_micro_batch} needs automatic optimization: under manual optimization "
            "training_step owns the passes; drop the argument"
        )


def check_set_up(part: Any, name: str) -> Any:
    """Returns ``part`` of the strategy once it is there.

    Raises:
        NTPError: before.
    """
    if part is None:
        raise NTPError(f"strategy.{name} is known once the Trainer has set the strategy up")
    return part
