"""A LightningCLI script: python cli.py fit --config ...; prints where each member sits when the fit has ended."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def is_healthy() -> bool:
    """A check of the device."""
    return True


class Net(LightningModule):
    """A next-token model: embedding, feed-forward network, head."""

    def __init__(self, width: int = 16, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(32, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, 32)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch)
        return cross_entropy(self.head(self.down(self.up(x).relu()))[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(0)), batch_size=2)

    def on_fit_end(self) -> None:
        strategy, member = self.trainer.strategy, self.trainer.strategy.member
        seat = strategy.topology.members[member.rank]
        print(f"{seat} of {strategy.degrees}, shares {strategy.shares}, step {self.trainer.global_step}\n", end="")


if __name__ == "__main__":
    LightningCLI(Net)
