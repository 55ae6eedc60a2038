"""The dense reference, its models and batches, and the comparison that every parity test uses."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.support import cases
from tests.support.batches import TokenDataset, batch, padded_batch, sample, sample_length
from tests.support.models import IGNORE_INDEX, ModelConfig, build, loss_fn, padded_loss_fn
from tests.support.reference import assert_parity, train_dense

FUSED = ModelConfig(num_kv_heads=2, fused_qkv=True, fused_gate_up=True, bias=True)
BATCHES = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


@pytest.mark.parametrize("config", cases.FEATURES.values(), ids=cases.FEATURES.keys())
def test_every_parameter_learns(config):
    model = build(config)
    tokens = batch([0, 1], config.vocab)
    logits = model(tokens)
    assert logits.shape == (2, 8, config.vocab) and logits.dtype == torch.float64
    loss_fn(logits, tokens).backward()
    without_gradient = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert without_gradient == ({"unused.weight", "unused.bias"} if config.unused else set())


def test_names():
    names = {name for name, _ in build(ModelConfig(layers=1)).named_parameters()}
    attention = {f"layers.0.attn.{part}_proj.weight" for part in "qkvo"}
    mlp = {f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    norms = {"layers.0.norm1.weight", "layers.0.norm2.weight", "norm.weight"}
    assert names == attention | mlp | norms | {"embed.weight", "lm_head.weight"}
    fused = {name for name, _ in build(ModelConfig(layers=1, fused_qkv=True, fused_gate_up=True)).named_parameters()}
    assert fused - names == {"layers.0.attn.qkv_proj.weight", "layers.0.mlp.gate_up_proj.weight"}
    tied = build(ModelConfig(tied=True))
    assert tied.lm_head.weight is tied.embed.weight


def test_fused_equals_split():
    fused, split = build(FUSED), build(ModelConfig(num_kv_heads=2, bias=True))
    state = fused.state_dict()
    for i in range(2):
        for kind in ("weight", "bias"):
            q, k, v = state.pop(f"layers.{i}.attn.qkv_proj.{kind}").split([32, 8, 8])
            gate, up = state.pop(f"layers.{i}.mlp.gate_up_proj.{kind}").chunk(2)
            parts = {"attn.q": q, "attn.k": k, "attn.v": v, "mlp.gate": gate, "mlp.up": up}
            state |= {f"layers.{i}.{name}_proj.{kind}": part for name, part in parts.items()}
    split.load_state_dict(state)
    torch.testing.assert_close(fused(batch([0, 1])), split(batch([0, 1])), rtol=1e-13, atol=1e-13)


def test_attention_is_causal():
    model = build(ModelConfig())
    tokens = batch([0])
    later = tokens.clone()
    later[0, 5:] = 0
    assert torch.equal(model(tokens)[:, :5], model(later)[:, :5])


def test_build_is_deterministic():
    first, second, other = build(FUSED, seed=1), build(FUSED, seed=1), build(FUSED, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.embed.weight, other.embed.weight)
    assert torch.equal(build(FUSED, 1, torch.float32).embed.weight, first.embed.weight.float())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_empty_slot_runs():
    """A slot without heads, as a localised attention would be, gives zero columns and gradients of zero size."""

    def linear(inputs, outputs):
        return torch.nn.utils.skip_init(torch.nn.Linear, inputs, outputs, bias=False, dtype=torch.float64)

    attention = build(ModelConfig(layers=1)).layers[0].attn
    attention.num_heads = attention.num_kv_heads = 0
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(attention, name, linear(32, 0))
    attention.o_proj = linear(0, 32)
    x = torch.randn(2, 5, 32, dtype=torch.float64, requires_grad=True)
    attention(x).sum().backward()
    assert not x.grad.any()


@pytest.mark.parametrize(("values", "message"), [
    ({"num_kv_heads": 3}, "num_heads=8 is not a multiple of num_kv_heads=3"),
    ({"width": 30}, "width=30 is not a multiple of num_heads=8"),
    ({"head_dim": 3}, "even head_dim"),
    ({"gated": False, "fused_gate_up": True}, "needs gated=True"),
])  # fmt: skip
def test_bad_config(values, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**values)


def test_batches_are_functions_of_the_ids():
    assert torch.equal(batch([5, 2]), torch.stack([sample(5), sample(2)]))
    assert batch([]).shape == (0, 8)
    assert len({tuple(sample(i).tolist()) for i in range(200)}) == 200
    index, tokens = TokenDataset(6, with_index=True)[5]
    assert index == 5 and torch.equal(tokens, sample(5))


def test_padded_loss_is_the_mean_over_valid_tokens():
    model = build(ModelConfig())
    ids = [0, 1, 2, 3]
    tokens, labels = padded_batch(ids)
    assert [int((row != IGNORE_INDEX).sum()) for row in labels] == [sample_length(i) for i in ids]
    loss, num_valid = padded_loss_fn(model(tokens), labels)
    assert num_valid == sum(sample_length(i) - 1 for i in ids)
    alone = [padded_loss_fn(model(padded_batch([i])[0]), padded_batch([i])[1]) for i in ids]
    torch.testing.assert_close(loss, sum(part * n for part, n in alone) / num_valid)
    loss, num_valid = padded_loss_fn(model(tokens), torch.full_like(labels, IGNORE_INDEX))
    assert (loss.item(), num_valid) == (0.0, 0)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_dense_run_is_reproducible(optimizer, padded):
    first, second = (train_dense(FUSED, BATCHES, optimizer=optimizer, padded=padded) for _ in range(2))
    assert_parity(first, second, rtol=0.0)
    assert len(first.losses) == 3 and first.norms[0] > 1.0  # so clipping is in effect
    assert not torch.equal(first.weights[0]["embed.weight"], first.initial["embed.weight"])


def test_dense_run_learns():
    history = train_dense(ModelConfig(), [[0, 1, 2, 3]] * 30, lr=1e-2)
    assert history.losses[-1] < 0.5 * history.losses[0]


def test_unused_parameter_keeps_its_value():
    history = train_dense(ModelConfig(unused=True), BATCHES)
    assert torch.equal(history.weights[-1]["unused.weight"], history.initial["unused.weight"])


def test_parity_accepts_reordered_sums():
    """What a distributed run does to the numbers: another order of the same samples."""
    shuffled = [[2, 0, 1], [5, 4, 3], [7, 8, 6]]
    assert_parity(train_dense(ModelConfig(), shuffled), train_dense(ModelConfig(), BATCHES))


def test_parity_names_step_and_parameter():
    dense = train_dense(ModelConfig(), BATCHES)
    off = copy.deepcopy(dense)
    off.weights[1]["layers.0.mlp.up_proj.weight"][2, 3] += 1e-9
    off.weights[1]["norm.weight"][0] += 1e-10
    with pytest.raises(AssertionError) as caught:
        assert_parity(off, dense)
    text = str(caught.value)
    assert text.startswith("step 1 of 3 differs") and "worst in layers.0.mlp.up_proj.weight[2, 3]" in text
    assert "2 of 21 parameters are off" in text


def test_parity_sees_loss_norm_nan_and_names():
    dense = train_dense(ModelConfig(), BATCHES)
    loss, norm, nan, names = (copy.deepcopy(dense) for _ in range(4))
    loss.losses[0] *= 1 + 1e-11
    norm.norms[2] *= 1 + 1e-11
    nan.weights[0]["norm.weight"][1] = torch.nan
    del names.weights[0]["norm.weight"]
    for history, message in (
        (loss, "step 0 .*\n.*loss"), (norm, "step 2 .*\n.*norm"), (nan, r"norm.weight\[1\]"), (names, "missing"),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=message):
            assert_parity(history, dense)


def test_covering_table_covers():
    covering = cases.COVERING
    assert {case.degrees for case in covering} == set(cases.DEGREES)
    heads = {(case.model.num_heads, case.model.num_kv_heads) for case in covering}
    assert heads == {(8, 8), (7, 7), (8, 2), (6, 3), (64, 8)}
    for attribute, values in {
        "fused_qkv": {False, True}, "fused_gate_up": {False, True}, "tied": {False, True}, "bias": {False, True},
        "norm": {"rms", "layer"}, "unused": {False, True}, "vocab": {101, 7}, "ffn": {44, 5}, "gated": {False, True},
    }.items():  # fmt: skip
        assert {getattr(case.model, attribute) for case in covering} == values, attribute
    assert all(case.degrees == (8, 7) for case in covering if case.model.num_heads == 64)
    assert any(case.model.fused_qkv and case.model.num_heads != case.model.num_kv_heads for case in covering)
    for table in (covering, cases.FULL):
        assert len({case.id for case in table}) == len(table)
    assert len(cases.FULL) == len(cases.DEGREES) * len(cases.FEATURES) + 1


def test_key_bias_without_rotary_is_tested_with_sgd():
    for case in (*cases.COVERING, *cases.FULL):
        assert case.optimizer == "sgd" or case.model.rotary or not case.model.bias, case.id
