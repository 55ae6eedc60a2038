"""The names that model code usually gives to projections, norms and head counts.

Only hints: a name decides nothing where the shapes do not fit, and every one can be given in the plan.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

CHILD_NAMES: Mapping[str, tuple[str, ...]] = {
    "q": ("q_proj", "wq", "q", "query", "q_linear", "to_q"),
    "k": ("k_proj", "wk", "k", "key", "k_linear", "to_k"),
    "v": ("v_proj", "wv", "v", "value", "v_linear", "to_v"),
    "qkv": ("qkv_proj", "qkv", "wqkv", "Wqkv", "in_proj", "to_qkv"),
    "o": ("o_proj", "wo", "o", "out_proj", "proj", "dense", "out", "to_out"),
    "gate": ("gate_proj", "w1", "gate"),
    "up": ("up_proj", "w3", "fc1", "up", "fc_in"),
    "down": ("down_proj", "w2", "fc2", "down", "fc_out"),
    "gate_up": ("gate_up_proj", "w13", "gate_up", "wi"),
}
HEAD_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")
HEAD_COUNT_NAMES = ("num_heads", "n_heads", "n_head", "num_attention_heads", "nheads", "nhead", "heads")
HEAD_SIZE_NAMES = ("head_dim", "head_size", "attention_head_size", "dim_head")
CONFIG_NAMES = ("config", "cfg", "args", "params", "hparams")


def linear_child(module: nn.Module, role: str) -> str | None:
    """The attribute of ``module`` that is a Linear and has a usual name of ``role`` (a key of ``CHILD_NAMES``)."""
    return next((name for name in CHILD_NAMES[role] if isinstance(getattr(module, name, None), nn.Linear)), None)


def role_of(name: str) -> str | None:
    """The role that a child's name usually has."""
    return next((role for role, names in CHILD_NAMES.items() if name in names), None)
