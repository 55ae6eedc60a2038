"""The README's training script with its callback, on replicas of degree 2, until it is told to stop.

    python readme_fit.py README.md
"""

from __future__ import annotations

import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

OTHER_SIZES = {
    "devices=8": "devices=4",
    "tensor_parallel_size=4": "tensor_parallel_size=2",
    "max_epochs=1,": "max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,"
    " enable_model_summary=False, callbacks=[Pager(), Slowly()],",
}


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


class Slowly(Callback):
    """Leaves time for whoever acts upon the job from outside."""

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.02)


def main(readme: str) -> None:
    """Run the first block of Python and the last."""
    blocks = re.findall(r"^```python\n(.*?)^```", Path(readme).read_text(), re.DOTALL | re.MULTILINE)
    training, pager = blocks[0], blocks[-1]
    for here, there in OTHER_SIZES.items():
        assert here in training, here
        training = training.replace(here, there)
    data = DataLoader(torch.randn(100_000, 8), batch_size=4)
    names: dict[str, Any] = {"model": Tiny(), "train_loader": data, "Slowly": Slowly}
    exec(compile(pager + training, "README.md", "exec"), names)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1])
