"""The LightningModule: loss, optimizer, schedule, and the plan that names what is sharded."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from gpt.model import GPT, GPTConfig


def parallel_plan(heads: int, kv_heads: int) -> dict[str, str]:
    """Which modules of ``GPTModule`` are sharded, and how: all that nonuniform tensor parallelism needs to know."""
    return {
        "model.embed": "vocab",
        "model.layers.*.attn": f"attention(num_heads={heads}, num_kv_heads={kv_heads})",
        "model.layers.*.mlp": "ffn",
        "model.lm_head": "colwise(gather_output=True)",
    }


def warmup_cosine(step: int, warmup_steps: int, max_steps: int, floor: float = 0.1) -> float:
    """Factor on the learning rate: linear up over ``warmup_steps``, then a half cosine down to ``floor``."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


class GPTModule(LightningModule):
    """Next-byte prediction. Batches are token ids of shape (batch, seq_len + 1).

    Args:
        lr: Highest learning rate.
        warmup_steps: Optimizer steps until the learning rate is reached.
        max_steps: Optimizer steps of the whole schedule.
        weight_decay: AdamW's decay of matrices; norms are not decayed.
        **sizes: The fields of ``GPTConfig``.
    """

    def __init__(
        self, lr: float = 3e-3, warmup_steps: int = 10, max_steps: int = 100, weight_decay: float = 0.1, **sizes: Any
    ) -> None:
        super().__init__()
        # Plain numbers only, so that a checkpoint of this module loads with weights_only=True.
        self.save_hyperparameters()
        self.config = GPTConfig(**sizes)
        self.model = GPT(self.config)
        self.example_input_array = torch.zeros(1, 8, dtype=torch.long)

    @property
    def ntp_plan(self) -> dict[str, str]:
        return parallel_plan(self.config.heads, self.config.kv_heads)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, shape (batch, length, vocab_size)."""
        return self.model(tokens)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(batch))
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True, batch_size=len(batch))

    def configure_optimizers(self) -> dict[str, Any]:
        matrices = [weight for weight in self.parameters() if weight.dim() > 1]
        vectors = [weight for weight in self.parameters() if weight.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": self.hparams.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr, betas=(0.9, 0.95))
        warmup_steps, max_steps = self.hparams.warmup_steps, self.hparams.max_steps
        schedule = LambdaLR(optimizer, lambda step: warmup_cosine(step, warmup_steps, max_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _loss(self, batch: Tensor) -> Tensor:
        """Mean cross entropy in nats a byte; every sequence has the same number of targets."""
        logits = self(batch[:, :-1]).flatten(0, 1)
        # At least float32, and never less than the model's own precision.
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), batch[:, 1:].flatten())
