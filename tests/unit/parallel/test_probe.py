"""The forward on meta tensors at every degree: what it finds, what it leaves alone."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ntp.errors import PlanError
from lightning_ntp.parallel import ParallelPlan, TensorParallelContext, parallelize
from lightning_ntp.parallel.plans.auto import find_plan
from lightning_ntp.parallel.probing.clone import ShapeExchange, places
from lightning_ntp.parallel.probing.probe import ShapeProbe
from tests.support.models import ModelConfig, build

HEADS, KV_HEADS, HEAD_DIM, WIDTH = 8, 4, 8, 32


class Attention(nn.Module):
    """Grouped-query attention whose ``split`` cuts the projections into heads as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.n_kv = HEAD_DIM, KV_HEADS
        self.my_heads = HEADS
        self.q_proj, self.o_proj = nn.Linear(WIDTH, HEADS * HEAD_DIM), nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM), nn.Linear(WIDTH, KV_HEADS * HEAD_DIM)

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def forward(self, x: Tensor) -> Tensor:
        q = self.split(self.q_proj(x), HEADS).transpose(1, 2)
        k, v = (self.split(layer(x), KV_HEADS).transpose(1, 2) for layer in (self.k_proj, self.v_proj))
        k, v = (t.repeat_interleave(max(1, q.shape[1] // t.shape[1]), dim=1) for t in (k, v))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class HardCoded(Attention):
    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, HEAD_DIM)


class FreeHeadSize(Attention):
    """Runs at every degree, on wrong heads."""

    def split(self, x: Tensor, heads: int) -> Tensor:
        return (x.double() * 1.0).view(*x.shape[:2], heads, -1).float()

    def forward(self, x: Tensor) -> Tensor:
        q = self.split(self.q_proj(x), HEADS).transpose(1, 2)
        return self.o_proj(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2))


class ByAttribute(Attention):
    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], self.my_heads if heads == HEADS else self.n_kv, self.head_dim)


def probe(block: nn.Module, style: str, degree: int = 4, lowest: int = 1) -> tuple[nn.Module, ShapeProbe]:
    """Two of ``block``, sharded, and their probe."""
    model = nn.Sequential(block, block.__class__())
    context = TensorParallelContext.at(ShapeExchange(0, degree), degree, 0, degree, lowest)
    return model, ShapeProbe(parallelize(model, ParallelPlan({"*": style}), context))


def data() -> Tensor:
    return torch.randn(2, 3, WIDTH)


PLAIN = f"attention(num_heads={HEADS}, num_kv_heads={KV_HEADS})"


def test_good_code_passes_and_nothing_stays():
    model, shapes = probe(Attention(), PLAIN)
    shapes.attach()
    model(data())
    assert not shapes._handles
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    model(data())
    assert hooks == [len(module._forward_pre_hooks) for module in model.modules()]


@pytest.mark.parametrize("kind", [HardCoded, FreeHeadSize])
@pytest.mark.parametrize("lowest", [1, 4])
def test_hard_coded_head_count(kind, lowest):
    """A9: also where the current degree is the only one."""
    model, shapes = probe(kind(), PLAIN, lowest=lowest)
    shapes.attach()
    with pytest.raises(PlanError, match=rf"'0' \({kind.__name__}\) does not follow .* degree 4, slot 0") as error:
        model(data())
    text = str(error.value)
    assert "test_probe.py:" in text and "view(" in text
    assert "localize=" in text and "view(..., -1, head_dim)" in text


def test_a_degree_that_comes_later_is_checked():
    """8 heads at 8: one each. Code that counts on one head a slot runs now and not at 7."""

    class OneHead(Attention):
        def split(self, x: Tensor, heads: int) -> Tensor:
            is_dense = x.shape[-1] == HEADS * HEAD_DIM
            return x.unflatten(-1, (-1, HEAD_DIM)) if is_dense else x.view(*x.shape[:2], 1, HEAD_DIM)

        def forward(self, x: Tensor) -> Tensor:
            q = self.split(self.q_proj(x), HEADS)
            return self.o_proj(q.flatten(2))

    model, shapes = probe(OneHead(), PLAIN, degree=8, lowest=7)
    shapes.attach()
    with pytest.raises(PlanError, match="at degree 7, slot 0 of tensor_parallel_size=8"):
        model(data())


def test_localized_attributes_follow_the_place():
    listed = PLAIN[:-1] + ", localize={'my_heads': 'heads', 'n_kv': 'kv_heads'})"
    model, shapes = probe(ByAttribute(), listed, degree=8)
    shapes.check("0", (data(),), {})
    assert model[0].my_heads == 1  # the real one is untouched
    unlisted, shapes = probe(ByAttribute(), PLAIN)
    with pytest.raises(PlanError, match="'0' .* does not follow the slot"):
        shapes.check("0", (data(),), {})


def test_an_output_that_is_local():
    class Leaks(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return self.q_proj(x)

    _, shapes = probe(Leaks(), PLAIN)
    with pytest.raises(PlanError, match=r"its output has the shape \(2, 3, 16\), dense \(2, 3, 64\)"):
        shapes.check("0", (data(),), {})


def test_code_that_needs_values_is_skipped(caplog):
    class Reads(HardCoded):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum().item() > 1e9 else self.o_proj(self.q_proj(x))

    model, shapes = probe(Reads(), PLAIN)
    shapes.attach()
    with caplog.at_level(logging.WARNING):
        model(data())
    assert "'0' could not be checked for other degrees: it does not run on meta tensors" in caplog.text


@dataclass
class Bag:
    x: Tensor
    items: list


def test_inputs_of_all_kinds_stay_as_they_are():
    class Takes(Attention):
        def forward(self, bag, pair=(None, None), *, scale, none=None):
            bag.items.append(bag.x)  # a cache: the probe works on a copy
            mask = torch.ones(3, 3).tril()  # on the default device
            return super().forward(bag.x * scale + pair[1]) + mask.sum() * 0

    model = nn.ModuleList([Takes()])
    context = TensorParallelContext.at(ShapeExchange(0, 4), 4, 0, 4)
    shapes = ShapeProbe(parallelize(model, ParallelPlan({"*": PLAIN}), context))
    shapes.attach()
    bag = Bag(data().requires_grad_(), [])
    out = model[0](bag, (None, torch.ones(())), scale=torch.tensor(2.0, dtype=torch.bfloat16))
    assert len(bag.items) == 1 and bag.items[0] is bag.x and out.shape == bag.x.shape


def test_autocast_random_numbers_and_gradients_are_left_alone():
    class Drops(Attention):
        def forward(self, x: Tensor) -> Tensor:
            random.random()
            return F.dropout(super().forward(x), 0.5, self.training).bfloat16() @ torch.eye(WIDTH, dtype=torch.bfloat16)

    _, shapes = probe(Drops(), PLAIN)
    x = data().requires_grad_()
    before = torch.get_rng_state(), random.getstate()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        shapes.check("0", (x,), {})
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert x.grad is None


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(num_kv_heads=2),
        ModelConfig(width=24, num_heads=6, num_kv_heads=3, fused_qkv=True, fused_gate_up=True, bias=True),
        ModelConfig(width=28, num_heads=7, num_kv_heads=7, vocab=7, ffn=5, tied=True),
    ],
    ids=["gqa-8-2", "gqa-6-3-fused", "heads-7"],
)
def test_whole_model_at_nominal_8(config):
    """Empty slots, ragged groups, and the input given beforehand."""
    model = build(config)
    plan = ParallelPlan(
        {
            "embed": "vocab",
            "layers.*.attn": f"attention({config.num_heads}, {config.num_kv_heads})",
            "layers.*.mlp": "ffn",
            "lm_head": "colwise(gather_output=True)",
        }
    )
    sharded = parallelize(model, plan, TensorParallelContext.at(ShapeExchange(0, 8), 8, 0, 8))
    assert ShapeProbe(sharded).run(torch.zeros(2, 5, dtype=torch.long))


def test_pairs_outside_of_blocks_are_checked():
    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](self[0](x).view(-1, 2, 16).flatten(1))

    model = nn.ModuleDict({"net": Net(nn.Linear(4, 32), nn.Linear(32, 4))})
    plan = ParallelPlan({"net.0": "colwise", "net.1": "rowwise"})
    shapes = ShapeProbe(parallelize(model, plan, TensorParallelContext.at(ShapeExchange(0, 4), 4, 0, 4)))
    shapes.attach()
    with pytest.raises(PlanError, match="'net' .* does not follow the slot"):
        model["net"](torch.randn(3, 4))


def test_places_that_look_the_same_are_one():
    model = build(ModelConfig())
    sharded = parallelize(model, find_plan("auto", model), TensorParallelContext.at(ShapeExchange(0, 8), 8, 0, 8))
    found = [(place.degree, place.slot) for place in places(sharded, model.layers[0].attn)]
    assert found[0] == (8, 0) and (8, 1) not in found and (7, 0) in found
    assert len(found) < 12
