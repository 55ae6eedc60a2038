"""A7: models of others at degrees 4 and 3 by their own plan, and a fused-QKV model, equal the dense model in fp64."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("transformers")

from tests.dist.once import assert_equals_dense, run_once
from tests.support.hub import HubModel
from tests.support.models import ModelConfig, build

DEGREES = (4, 3)

MODELS = {
    "llama-6-3-sdpa": HubModel(),
    "llama-6-3-eager-tied": HubModel(attention="eager", options={"tie_word_embeddings": True}),
    "llama-8-2-eager-bias": HubModel(
        heads=8, kv_heads=2, attention="eager", options={"attention_bias": True, "mlp_bias": True}
    ),
    "llama-8-2-sdpa-tied": HubModel(heads=8, kv_heads=2, options={"tie_word_embeddings": True}),
    "qwen3-6-3-norms": HubModel("qwen3", options={"head_dim": 8}, exact_norms=True),
    "phi3-gathered": HubModel("phi3"),
    "gpt-neox-interleaved": HubModel("gpt-neox", heads=6, kv_heads=6),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_by_its_own_plan(workers, make):
    outcomes = workers.run(run_once, sum(DEGREES), make, "auto", DEGREES, make.vocab, timeout_s=120)
    assert_equals_dense(outcomes, make, DEGREES, make.vocab, in_parts=True)  # their norms and softmax are in fp32


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(width=24, num_heads=6, num_kv_heads=3, fused_qkv=True, bias=True),
        ModelConfig(num_kv_heads=2, fused_qkv=True, fused_gate_up=True, tied=True),
    ],
    ids=["6-3-bias", "8-2-gate-up-tied"],
)
def test_fused_model(workers, config):
    plan = {
        "embed": "vocab",
        "layers.*.attn": f"attention(num_heads={config.num_heads}, num_kv_heads={config.num_kv_heads})",
        "layers.*.mlp": "ffn",
        "lm_head": "colwise(gather_output=True)",
    }
    make = partial(build, config)
    outcomes = workers.run(run_once, sum(DEGREES), make, plan, DEGREES, config.vocab)
    assert_equals_dense(outcomes, make, DEGREES, config.vocab)


def test_an_inferred_plan_of_closed_styles(workers):
    """What ``plan="auto"`` makes of a fused model that says nothing: gathered outputs."""
    config = ModelConfig(width=24, num_heads=6, num_kv_heads=3, fused_qkv=True, fused_gate_up=True, tied=True)
    make = partial(build, config)
    outcomes = workers.run(run_once, sum(DEGREES), make, "auto", DEGREES, config.vocab)
    assert_equals_dense(outcomes, make, DEGREES, config.vocab)
