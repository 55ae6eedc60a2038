"""Everything in the example that speaks of nonuniform tensor parallelism: the strategy, and what it says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer

from gpt.settings import Settings


@dataclass(frozen=True)
class Replica:
    """One line of the closing table.

    Attributes:
        name: ``r0``, ``r1``, ...
        degree: Number of live tensor-parallel ranks.
        share: Samples of a global batch that the replica takes.
    """

    name: str
    degree: int
    share: int


def make_strategy(settings: Settings) -> Any:
    """What the Trainer gets as ``strategy``."""
    if not settings.is_ntp:
        return settings.strategy
    # Imported here so that the dense run needs Lightning alone.
    from lightning_ntp import NTPStrategy

    return NTPStrategy(
        data_parallel_size=len(settings.degrees),
        tensor_parallel_size=max(settings.degrees),
        degrees=settings.degrees,
        plan="auto",
        global_batch=settings.global_batch,
    )


def replicas_of(trainer: Trainer, settings: Settings) -> list[Replica]:
    """The replicas as they are at the end of the run."""
    if settings.is_ntp:
        degrees, shares = trainer.strategy.degrees, trainer.strategy.shares
    else:
        degrees = [1] * trainer.world_size
        shares = [settings.batch_size * settings.accumulate] * trainer.world_size
    return [Replica(f"r{i}", *pair) for i, pair in enumerate(zip(degrees, shares, strict=True))]
