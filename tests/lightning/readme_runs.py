"""The README's Python and the example's script, run by ranks that are there already."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "examples"))  # the example is a script beside the package, not part of it

import train_gpt  # noqa: E402
from gpt.settings import parse  # noqa: E402


class Tiny(LightningModule):
    """A feed-forward network under one of the usual names, and nothing about sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(8, 32)
        self.down_proj = nn.Linear(32, 8)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.down_proj(self.up_proj(batch).relu()) - batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run_block(rank: int, world_size: int, store: str, code: str) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Run a block of the README that fits ``model`` to ``train_loader``."""
    names: dict[str, Any] = {"model": Tiny(), "train_loader": DataLoader(torch.randn(40, 8), batch_size=4)}
    exec(compile(code, "README.md", "exec"), names)
    trainer = names["trainer"]
    return trainer.strategy.degrees, trainer.strategy.shares, trainer.global_step


def run_example(rank: int, world_size: int, store: str, arguments: list[str]) -> str:
    """The example's ``main``; what it printed."""
    train_gpt.quieten()
    train_gpt.main(parse(arguments))
    sys.stdout.flush()
    return Path("/proc/self/fd/1").read_text()
