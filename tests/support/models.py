"""A small transformer in plain torch, with a switch for everything that a parallel plan has to cope with.

It is written as users write models: linears, ``view`` with the module's own head counts, scaled dot-product attention.
Nothing in it knows of tensor parallelism.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE_INDEX = -100


@dataclass(frozen=True)
class ModelConfig:
    """A transformer's shape.

    Attributes:
        head_dim: Columns of a head; by default width / num_heads.
        ffn: Inner width of the feed-forward network.
        bias: Whether the linears of attention and feed-forward network have biases.
        fused_qkv: One projection with the output [q | k | v] instead of three.
        fused_gate_up: One projection with the output [gate | up] instead of two.
        tied: Whether ``lm_head.weight`` is ``embed.weight``.
        unused: Whether there is a linear that no forward touches.
        gated: SiLU-gated feed-forward network with three matrices; else GELU with two.
    """

    vocab: int = 101
    width: int = 32
    num_heads: int = 8
    num_kv_heads: int = 8
    head_dim: int | None = None
    ffn: int = 44
    layers: int = 2
    norm: Literal["rms", "layer"] = "rms"
    bias: bool = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    tied: bool = False
    rotary: bool = True
    unused: bool = False
    gated: bool = True

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim is None and self.width % self.num_heads:
            raise ValueError(f"width={self.width} is not a multiple of num_heads={self.num_heads}: give head_dim")
        if self.rotary and self.columns_per_head % 2:
            raise ValueError(f"rotary needs an even head_dim, not {self.columns_per_head}")
        if self.fused_gate_up and not self.gated:
            raise ValueError("fused_gate_up=True needs gated=True")

    @property
    def columns_per_head(self) -> int:
        return self.head_dim or self.width // self.num_heads


class Attention(nn.Module):
    """Causal grouped-query self-attention: (batch, time, width) -> the same."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.columns_per_head
        self.rotary = config.rotary
        self.fused = config.fused_qkv
        query_columns = self.num_heads * self.head_dim
        kv_columns = self.num_kv_heads * self.head_dim
        if self.fused:
            self.qkv_proj = nn.Linear(config.width, query_columns + 2 * kv_columns, bias=config.bias)
        else:
            self.q_proj = nn.Linear(config.width, query_columns, bias=config.bias)
            self.k_proj = nn.Linear(config.width, kv_columns, bias=config.bias)
            self.v_proj = nn.Linear(config.width, kv_columns, bias=config.bias)
        self.o_proj = nn.Linear(query_columns, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        query_columns, kv_columns = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if self.fused:
            q, k, v = self.qkv_proj(x).split([query_columns, kv_columns, kv_columns], dim=-1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q = q.view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
        k = k.view(b, t, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = v.view(b, t, self.num_kv_heads, self.head_dim).transpose(1, 2)
        if self.rotary:
            q, k = rotate(q), rotate(k)
        group = self.num_heads // max(1, self.num_kv_heads)  # a slot without units has no heads of either kind
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(b, t, query_columns))


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of (batch, heads, time, head_dim), halves rotated against each other."""
    t, dim = x.shape[-2:]
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=x.device) / dim)
    angles = torch.outer(torch.arange(t, dtype=torch.float64, device=x.device), frequencies)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class MLP(nn.Module):
    """Feed-forward network: (batch, time, width) -> the same."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gated = config.gated
        self.fused = config.fused_gate_up
        if self.fused:
            self.gate_up_proj = nn.Linear(config.width, 2 * config.ffn, bias=config.bias)
        elif self.gated:
            self.gate_proj = nn.Linear(config.width, config.ffn, bias=config.bias)
        if not self.fused:
            self.up_proj = nn.Linear(config.width, config.ffn, bias=config.bias)
        self.down_proj = nn.Linear(config.ffn, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.down_proj(F.gelu(self.up_proj(x)))
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1) if self.fused else (self.gate_proj(x), self.up_proj(x))
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm attention and feed-forward network."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1 = _norm(config)
        self.attn = Attention(config)
        self.norm2 = _norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A language model: token ids (batch, time) -> logits (batch, time, vocab)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = _norm(config)
        self.lm_head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tied:
            self.lm_head.weight = self.embed.weight
        if config.unused:
            self.unused = nn.Linear(config.width, config.width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def build(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> Transformer:
    """A model whose weights depend on ``config`` and ``seed`` alone; in fp32 they are the fp64 ones rounded.

    No parameter is at a value that would hide a mistake: norm weights are not 1, biases not 0.
    """
    model = Transformer(config).to(torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() == 2:
                parameter.copy_(noise / math.sqrt(parameter.shape[1]))
            else:
                parameter.copy_(0.1 * noise + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
    return model.to(dtype)


def loss_fn(logits: Tensor, ids: Tensor) -> Tensor:
    """Next-token cross entropy, the mean over all predicted tokens.

    Args:
        logits: (batch, time, vocab).
        ids: (batch, time).
    """
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def padded_loss_fn(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Next-token cross entropy over the tokens whose label is not ``IGNORE_INDEX``, and how many these are.

    Returns:
        The mean over the valid tokens (0 if there is none), and their number.
    """
    targets = labels[:, 1:].flatten()
    num_valid = int((targets != IGNORE_INDEX).sum())
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=IGNORE_INDEX, reduction="sum")
    return total / max(num_valid, 1), num_valid


def _norm(config: ModelConfig) -> nn.Module:
    return nn.RMSNorm(config.width, eps=1e-6) if config.norm == "rms" else nn.LayerNorm(config.width)
