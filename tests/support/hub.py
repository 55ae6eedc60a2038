"""Small random-weight Hugging Face models, from configs, without any download."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "gpt-neox": (GPTNeoXConfig, GPTNeoXForCausalLM),
}


@dataclass(frozen=True)
class HubModel:
    """A recipe that makes the same fp64 model in every process.

    Attributes:
        kind: A key of ``KINDS``.
        heads: Query heads, of 8 columns each.
        kv_heads: KV heads.
        attention: ``"eager"`` or ``"sdpa"``.
        options: More fields of the config.
        exact_norms: Put torch's RMSNorm, which stays in fp64, in the place of the library's, which computes in fp32.
            Where a norm is applied to repeated KV heads, fp32 rounds each copy's gradient instead of their sum.
    """

    kind: str = "llama"
    heads: int = 6
    kv_heads: int = 3
    attention: str = "sdpa"
    options: dict[str, Any] = field(default_factory=dict)
    exact_norms: bool = False
    vocab: int = 101

    def __call__(self) -> torch.nn.Module:
        transformers.logging.set_verbosity_error()
        make_config, make_model = KINDS[self.kind]
        config = make_config(
            vocab_size=self.vocab, hidden_size=8 * self.heads, intermediate_size=44, num_hidden_layers=2,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, max_position_embeddings=64,
            bos_token_id=1, eos_token_id=2, pad_token_id=None, attn_implementation=self.attention, use_cache=False,
            **self.options,
        )  # fmt: skip
        torch.manual_seed(0)
        model = make_model(config).double()
        if self.exact_norms:
            _replace_norms(model)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():  # nothing may hide behind a zero bias or a norm of ones
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        return model.train()


def _replace_norms(model: torch.nn.Module) -> None:
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = torch.nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon, dtype=torch.float64)
            model.set_submodule(name, norm)
