"""A Llama-like GPT in plain torch: RMSNorm, rotary positions, grouped-query attention, gated feed-forward.

Nothing in this file knows about tensor parallelism. It is the kind of model a user brings: ``nn.Linear`` and
``nn.Embedding`` under the usual names. One habit makes it shardable without a change: the number of heads is never
written into a shape, it follows from the width of what a projection returns. On a slot that holds three of eight
query heads the same code computes three heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of the model.

    Attributes:
        layers: Number of blocks.
        width: Size of the residual stream.
        heads: Number of query heads; ``width / heads`` is the head size and must be even (rotary turns pairs).
        kv_heads: Number of key/value heads; divides ``heads``.
        ffn_width: Inner size of the feed-forward.
        vocab_size: Number of tokens; 256 for bytes.
        tied: Whether embedding and head share one weight.
        rope_base: Base of the rotary frequencies.

    Raises:
        ValueError: if a size is below 1 or the heads do not fit each other.
    """

    layers: int = 4
    width: int = 256
    heads: int = 8
    kv_heads: int = 4
    ffn_width: int = 768
    vocab_size: int = 256
    tied: bool = False
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "ffn_width", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.width % (2 * self.heads):
            raise ValueError(f"width={self.width} with heads={self.heads}: choose a width that 2 * heads divides")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} with heads={self.heads}: choose kv_heads that divide heads")

    @property
    def head_size(self) -> int:
        return self.width // self.heads


def rotary_angles(length: int, head_size: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's rotation, each of shape (length, head_size / 2), in float32.

    Recomputed in each forward rather than kept in a buffer: it costs microseconds, and a model built on the meta
    device then has nothing but parameters to fill.
    """
    exponents = torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), base**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + head_size / 2]) of ``x``, shape (..., length, head_size), by their angles."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        kv_width = config.kv_heads * config.head_size
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, kv_width, bias=False)
        self.v_proj = nn.Linear(config.width, kv_width, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        query, key, value = (self._heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        # A slot without a query head has no key head either: max() keeps the division defined.
        group = query.size(1) // max(1, key.size(1))
        if group > 1:
            key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, length, heads * head_size) -> (batch, heads, length, head_size), for however many heads there are."""
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class FeedForward(nn.Module):
    """Gated feed-forward (SwiGLU)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.ffn_width, bias=False)
        self.up_proj = nn.Linear(config.width, config.ffn_width, bias=False)
        self.down_proj = nn.Linear(config.ffn_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and around a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        x = x + self.attn(self.attn_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Token ids of shape (batch, length) to logits of shape (batch, length, vocab_size)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        self._init_weights()
        if config.tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = rotary_angles(tokens.size(1), self.config.head_size, self.config.rope_base, tokens.device)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))

    def _init_weights(self) -> None:
        """Normal weights; those that write into the residual stream are thinner the more of them there are."""
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 * (2 * self.config.layers) ** (-0.5 if writes_residual else 0))
