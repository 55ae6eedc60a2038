"""What a joiner gets from the leader besides its shards: all that makes its Trainer go on as the others' do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer

from lightning_ntp.compat import loops
from lightning_ntp.compat.results import add_logged_keys, logged_keys
from lightning_ntp.engine.snapshot import RandomState
from lightning_ntp.strategies.loaders import ReplicaLoaders
from lightning_ntp.strategies.steps import StepRunner

MARK = "_ntp_dowry"
"""Key of a checkpoint that is no file's: weights and optimizer states have come another way."""


@dataclass
class TrainerDowry:
    """The leader's Trainer between two windows. It travels as a pickle, among members only.

    Attributes:
        checkpoint: What Lightning would save, without weights and optimizer states.
        loader: Position of the training loader, at the start of the window that comes.
        loop: What a checkpoint does not have of the loops in the middle of an epoch.
        seed: Of the run.
        random: The generators' states.
        loggers: Where the leader logs.
        checkpoints: What its ModelCheckpoints decide by and do not save.
        metrics: Its ``callback_metrics``.
        logged: Keys that were logged in this epoch.
    """

    checkpoint: dict[str, Any]
    loader: dict[str, Any]
    loop: loops.LoopFacts
    seed: int
    random: RandomState
    loggers: list[Any]
    checkpoints: dict[str, dict[str, Any]]
    metrics: dict[str, Any]
    logged: list[Any]


def make_dowry(trainer: Trainer, loaders: ReplicaLoaders, steps: StepRunner, loggers: list[Any]) -> TrainerDowry:
    """On the leader, at the start of a window, in the view that the joiner comes with."""
    position = loaders.position()  # first: the checkpoint has the loader's position, too
    checkpoint = loops.dump_checkpoint(trainer)
    checkpoint[MARK] = True
    return TrainerDowry(
        checkpoint,
        position,
        loops.LoopFacts.of(trainer),
        steps.seed,
        RandomState.take(),
        loggers,
        loops.unsaved_of_checkpoints(trainer),
        loops.callback_metrics(trainer),
        logged_keys(trainer),
    )


def take_dowry(dowry: TrainerDowry, trainer: Trainer, loaders: ReplicaLoaders, steps: StepRunner) -> None:
    """On the joiner, before Lightning restores: what it restores is the leader's."""
    loops.restore_from(trainer, dowry.checkpoint)
    loops.set_unsaved_of_checkpoints(trainer, dowry.checkpoints)
    loaders.go_to(dowry.loader)
    dowry.loop.prepare(trainer)
    steps.seed = dowry.seed


def settle_dowry(dowry: TrainerDowry, trainer: Trainer) -> None:
    """On the joiner, at its first step: what Lightning's restart has changed on the way."""
    dowry.loop.settle(trainer)
    loops.set_callback_metrics(trainer, dowry.metrics)
    add_logged_keys(trainer, dowry.logged)
    dowry.random.restore()
