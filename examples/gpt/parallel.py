"""Everything in the example that speaks of nonuniform tensor parallelism: the strategy, and what it says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer

from gpt.faults import plan_faults
from gpt.settings import Settings


@dataclass(frozen=True)
class Replica:
    """One line of the closing table.

    Attributes:
        name: ``r0``, ``r1``, ...
        degree: Number of live members; 0 if none is left.
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

    plan_faults(settings.faults)
    return NTPStrategy(
        data_parallel_size=len(settings.degrees),
        tensor_parallel_size=max(settings.degrees),
        degrees=settings.degrees,
        plan="auto",
        global_batch=settings.global_batch,
        respawn=settings.respawn,
    )


def replicas_of(trainer: Trainer, settings: Settings) -> list[Replica]:
    """The replicas as they are now, lost ones included."""
    if settings.is_ntp:
        live = {seats[0].replica: len(seats) for seats in trainer.strategy.topology.seats}
        shares = trainer.strategy.shares
    else:
        live = dict.fromkeys(range(trainer.world_size), 1)
        shares = [settings.batch_size * settings.accumulate] * trainer.world_size
    return [Replica(f"r{number}", live.get(number, 0), share) for number, share in enumerate(shares)]
