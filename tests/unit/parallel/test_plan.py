"""Plans as data: patterns, string forms, and what they say to bad input."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_ntp.errors import PlanError
from lightning_ntp.layout import Replicated, Sharded
from lightning_ntp.parallel import ParallelPlan, TensorParallelContext, parallelize, parse_style
from lightning_ntp.parallel.plans.patterns import compress
from lightning_ntp.parallel.probing.clone import ShapeExchange
from lightning_ntp.parallel.styles import FFN, Attention, Colwise, Replicate, Rowwise, Vocab, format_style
from tests.support.models import ModelConfig, Transformer, build


def context(degree: int, slot: int = 0, nominal: int | None = None) -> TensorParallelContext:
    return TensorParallelContext.at(ShapeExchange(slot, degree), degree, slot, nominal or degree)


@pytest.mark.parametrize(
    ("text", "style"),
    [
        ("colwise", Colwise()),
        ("colwise(gather_output=True)", Colwise(gather_output=True)),
        ("rowwise(units=8, split_input=True)", Rowwise(8, True)),
        ("Attention(8, num_kv_heads=2)", Attention(8, 2)),
        ("attention(num_heads=4, localize={'n': 'heads'})", Attention(4, localize={"n": "heads"})),
        ("ffn(up='fc1', down='fc2')", FFN(up="fc1", down="fc2")),
        ("replicate(partial_grad=True)", Replicate(True)),
        (" vocab ", Vocab()),
        (" attention( num_heads = 8 ,num_kv_heads=2 ) ", Attention(8, 2)),
    ],
)
def test_string_forms(text, style):
    assert parse_style(text) == style
    assert parse_style(format_style(style)) == style


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("colums", "unknown style 'colums'; there are colwise"),
        ("colwise(3, 4, 5)", r"colwise takes \(units, gather_output\)"),
        ("attention", r"attention takes \(num_heads"),
        ("colwise(units=n)", "is no style"),
        ("__import__('os')()", "is no style"),
        ("", "is no style"),
        (None, "None is no style"),
        ("colwise(units=0)", "units=0 must be a whole number of at least 1"),
        ("colwise(units='8')", "units='8' must be a whole number"),
        ("attention(num_heads=8.0)", r"num_heads=8\.0 must be a whole number"),
        ("attention(8, num_kv_heads=True)", "num_kv_heads=True must be a whole number"),
        ("replicate(partial_grad='no')", "partial_grad='no' must be True or False"),
    ],
)
def test_bad_strings(text, problem):
    with pytest.raises(PlanError, match=problem):
        ParallelPlan({"layers.*.x": text})


def test_patterns_stand_for_one_name_each():
    model = Transformer(ModelConfig())
    assert list(ParallelPlan({"layers.*.mlp": "ffn"}).match(model)) == ["layers.0.mlp", "layers.1.mlp"]
    with pytest.raises(PlanError, match=r"'layers.*.ml' names no module .* similar names are 'layers.\*.mlp'"):
        ParallelPlan({"layers.*.ml": "ffn"}).match(model)
    with pytest.raises(PlanError, match=r"pattern 'layers.\*\*.mlp' has '\*\*'.*one '\*' for every name"):
        ParallelPlan({"layers.**.mlp": "ffn"})  # would match the names of two letters and more: layers 10, 11, ...
    with pytest.raises(PlanError, match="both name 'layers.0.mlp'; keep one"):
        ParallelPlan({"layers.*.mlp": "ffn", "layers.0.*": "replicate"}).match(model)


def test_prefix():
    plan = ParallelPlan({"a.*": "colwise"}).with_prefix("net.0")
    assert plan.as_strings() == {"net.0.a.*": "colwise"}


def test_compress_keeps_what_is_the_same_together():
    model = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)) for _ in range(3))
    styles = {f"{i}.{j}": Colwise() if j == 0 else Rowwise() for i in range(3) for j in (2, 0)}
    assert compress(styles, model).as_strings() == {"*.0": "colwise", "*.2": "rowwise"}
    del styles["1.0"]
    assert compress(styles, model).as_strings() == {"0.0": "colwise", "*.2": "rowwise", "2.0": "colwise"}


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        ({"layers.*.attn": "attention(num_heads=3)"}, "num_heads=3 does not divide"),
        ({"layers.*.attn": "attention(num_heads=8, num_kv_heads=3)"}, "query heads must be a multiple of KV heads"),
        ({"layers.*.attn": "attention(num_heads=8, q='quack')"}, "no Linear for 'q' named 'quack'; its Linears are"),
        ({"layers.*.mlp": "attention(num_heads=8)"}, "has no Linear for 'q'; its Linears are"),
        ({"layers.*.mlp": "colwise"}, "'layers.0.mlp' is a MLP; name the Linear itself"),
        ({"layers.*.mlp": "ffn", "layers.*.mlp.up_proj": "colwise"}, "names 'layers.0.mlp.up_proj' twice"),
        ({"embed": "vocab"}, "is tied to one that the plan shards"),
        ({"layers.*.attn": "attention(num_heads=8, localize={'nope': 'heads'})"}, "localize names 'nope'"),
    ],
)
def test_a_plan_that_does_not_fit(plan, problem):
    with pytest.raises(PlanError, match=problem):
        parallelize(build(ModelConfig(tied=True)), ParallelPlan(plan), context(4))


def test_what_is_not_plain_is_not_replaced():
    class Scaled(nn.Embedding):
        def forward(self, tokens):
            return 2 * super().forward(tokens)

    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    model = nn.ModuleDict(
        {
            "scaled": Scaled(8, 4),
            "hooked": hooked,
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            "layer": nn.TransformerEncoderLayer(8, 2),
        }
    )
    for name, style, problem in (
        ("scaled", "vocab", "a Scaled with a forward of its own"),
        ("hooked", "colwise", "it has hooks"),
        ("normed", "colwise", "its weight is parametrized"),
        ("layer.linear1", "colwise", "reads its weight without calling it"),
    ):
        with pytest.raises(PlanError, match=f"the plan shards '{name}', but .*{problem}"):
            parallelize(model, ParallelPlan({name: style}), context(2))


def test_parameters_keep_their_names_and_say_how_they_lie():
    dense = build(ModelConfig(num_kv_heads=2, tied=True, fused_qkv=True))
    names = [name for name, _ in dense.named_parameters()]
    plan = {"embed": "vocab", "layers.*.attn": "attention(8, 2)", "lm_head": "colwise(gather_output=True)"}
    model = parallelize(dense, ParallelPlan(plan), context(3, 2, nominal=4))
    parameters = {parameter.name: parameter for parameter in model.parameters()}
    assert list(parameters) == names
    for parameter in parameters.values():
        assert parameter.local_shape(3, 2) == parameter.parameter.shape
    assert isinstance(parameters["layers.0.norm1.weight"].layout, Replicated)
    qkv = parameters["layers.0.attn.qkv_proj.weight"]
    assert isinstance(qkv.layout, Sharded) and len(qkv.layout.segments) == 3
    assert qkv.dense_shape == (48, 32) and qkv.dense_numel == 48 * 32
    assert dense.lm_head.weight is dense.embed.weight
    assert dense.layers[0].attn.num_heads == 2 and dense.layers[0].attn.num_kv_heads == 1
