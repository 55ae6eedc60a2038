"""Where a plan comes from when the user does not give one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from lightning_ntp.errors import PlanError
from lightning_ntp.parallel import ParallelPlan
from lightning_ntp.parallel.plans.auto import find_plan, locate_plan
from tests.support.models import ModelConfig, Transformer

GATHERED = "colwise(gather_output=True)"


def found(model: nn.Module, plan: object = "auto") -> dict[str, str]:
    return find_plan(plan, model).as_strings()


def test_the_argument_goes_first():
    model = Transformer(ModelConfig())
    model.ntp_plan = {"embed": "vocab"}
    assert found(model, {"lm_head": "colwise"}) == {"lm_head": "colwise"}
    assert found(model, {}) == {}
    plan = ParallelPlan({"lm_head": "vocab"})
    assert find_plan(plan, model) is plan
    assert found(model) == found(model, None) == {"embed": "vocab"}


@pytest.mark.parametrize("plan", ["tp", 3, ["embed"]])
def test_an_argument_that_is_no_plan(plan):
    with pytest.raises(PlanError, match="plan=.*use 'auto', a ParallelPlan, or a mapping"):
        find_plan(plan, nn.Linear(2, 2))


class Planned(nn.Module):
    def __init__(self, plan: object) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.plan = plan

    @property
    def ntp_plan(self):
        return self.plan


def test_plans_of_submodules_start_at_the_submodule():
    second = nn.ModuleList([Planned(ParallelPlan({"down": "rowwise"}))])
    model = nn.ModuleDict({"a": Planned({"up": "colwise"}), "b": second})
    result = locate_plan("auto", model)
    assert result.plan.as_strings() == {"a.up": "colwise", "b.0.down": "rowwise"}
    assert result.source == "a.ntp_plan, b.0.ntp_plan"
    model.ntp_plan = lambda: {"a.up": GATHERED}  # the root says it for all
    assert found(model) == {"a.up": GATHERED}
    with pytest.raises(PlanError, match=r"plan\['up'\] = 'nope': unknown style"):
        find_plan("auto", Planned({"up": "nope"}))


# Inference


def test_plain_transformer():
    assert found(Transformer(ModelConfig(num_kv_heads=2, tied=True))) == {
        "embed": "vocab",
        "layers.*.attn": "attention(num_heads=8, num_kv_heads=2)",
        "layers.*.mlp": "ffn",
        "lm_head": GATHERED,
    }


def test_the_order_of_a_fused_projection_cannot_be_seen():
    plan = found(Transformer(ModelConfig(fused_qkv=True, fused_gate_up=True)))
    assert plan["layers.*.attn.qkv_proj"] == plan["layers.*.mlp.gate_up_proj"] == GATHERED


def test_sequential():
    model = nn.Sequential(
        nn.Linear(4, 8), nn.GELU(), nn.Dropout(), nn.Linear(8, 8),  # a pair
        nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8),  # a norm needs all features
        nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip
    assert found(model) == {"0": "colwise", "3": "rowwise", "4": GATHERED, "6": "colwise", "8": "rowwise"}


class Attention(nn.Module):
    def __init__(self, **counts: object) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = nn.Linear(32, 32), nn.Linear(32, 8), nn.Linear(32, 8), nn.Linear(32, 32)
        vars(self).update(counts)


@pytest.mark.parametrize(
    "counts",
    [{"n_heads": 8}, {"head_dim": 4}, {"config": SimpleNamespace(num_attention_heads=8)}, {"args": {"n_heads": 8}}],
)
def test_head_counts_come_from_attributes_or_a_config(counts):
    assert found(nn.ModuleList([Attention(**counts)])) == {"*": "attention(num_heads=8, num_kv_heads=2)"}
    above = nn.ModuleList([Attention()])
    vars(above).update(counts)
    if "head_dim" not in counts:
        assert found(above) == {"*": "attention(num_heads=8, num_kv_heads=2)"}


def test_unknown_head_count():
    model = nn.ModuleDict({"attn": Attention(), "head": nn.Linear(32, 5)})
    with pytest.raises(PlanError, match="number of heads of 'attn' is not known") as error:
        find_plan("auto", model)
    assert "'attn': 'attention(num_heads=...)',\n    'head': 'colwise(gather_output=True)'," in str(error.value)
    with pytest.raises(PlanError, match="num_heads=3 does not fit"):
        find_plan("auto", nn.ModuleList([Attention(num_heads=3)]))


def test_layers_under_unusual_names_gather_their_output():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.table = nn.Linear(4, 8), nn.Linear(8, 4), nn.Embedding(9, 4)

    assert found(Net()) == {"first": GATHERED, "second": GATHERED, "table": "vocab"}


def test_fc1_and_fc2_with_a_norm_between_are_no_feed_forward():
    block = Planned(None)
    assert found(nn.ModuleDict({"a": block})) == {"a": "ffn"}
    block.inner = nn.LayerNorm(8)
    assert found(nn.ModuleDict({"a": block})) == {"a.up": GATHERED, "a.down": GATHERED}


class ReadsTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, tokens):
        return F.linear(self.mix(self.table(tokens)).to(self.mix.weight.dtype), self.table.weight)


def test_a_weight_that_is_read_directly_stays_whole():
    result = locate_plan("auto", ReadsTable())
    assert result.plan.as_strings() == {"mix": GATHERED}
    assert "'table' stays whole: some method reads table.weight or .bias directly" in result.notes
    assert any("% of the parameters stay whole" in note for note in result.notes)


def test_shared_layers_stay_whole():
    shared, table = nn.Linear(4, 4), nn.Embedding(9, 4, max_norm=1.0)
    head = nn.Linear(4, 9)
    head.weight = table.weight
    model = nn.ModuleDict({"a": shared, "b": shared, "table": table, "head": head, "c": nn.Linear(4, 4)})
    result = locate_plan("auto", model)
    assert result.plan.as_strings() == {"c": GATHERED}
    assert "'head' stays whole: its weight is shared with a layer that does" in result.notes


@pytest.mark.parametrize("model", [nn.Conv2d(3, 3, 1), nn.TransformerEncoderLayer(8, 2), nn.Identity()])
def test_nothing_to_shard(model):
    with pytest.raises(PlanError, match="(?s)no plan was found for .*plan={} replicates everything") as error:
        find_plan("auto", model)
    assert str(error.value).endswith("plan = {\n}")
    assert found(model, {}) == {}


# Others' plans


def test_torch_styles():
    model = Transformer(ModelConfig(num_kv_heads=2))
    torch_plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.attn.q_proj": ColwiseParallel(),
        "layers.*.attn.k_proj": ColwiseParallel(),
        "layers.*.attn.v_proj": ColwiseParallel(),
        "layers.*.attn.o_proj": RowwiseParallel(),
        "layers.*.mlp.gate_proj": ColwiseParallel(),
        "layers.*.mlp.up_proj": ColwiseParallel(),
        "layers.*.mlp.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    expected = {
        "embed": "vocab",
        "layers.*.attn": "attention(num_heads=8, num_kv_heads=2)",
        "layers.*.mlp": "ffn",
        "lm_head": GATHERED,
    }
    assert found(model, torch_plan) == expected
    del torch_plan["lm_head"]
    mixed = torch_plan | {"lm_head": "vocab"}
    assert found(model, mixed) == expected | {"lm_head": "vocab"}
    model.parallelize_plan = torch_plan
    assert locate_plan("auto", model).source == "parallelize_plan"


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        ({"lm_head": SequenceParallel()}, "SequenceParallel, which has no counterpart"),
        ({"lm_head": ColwiseParallel(input_layouts=Shard(1))}, "sequence-parallel layouts are not supported"),
        ({"lm_heed": ColwiseParallel()}, "'lm_heed' names no module"),
        ({"layers.*.mlp.up_proj": ColwiseParallel()}, "neither an attention .* nor a feed-forward"),
        ({"layers.*.norm1": RowwiseParallel()}, "'layers.0.norm1' 'rowwise', but it is a RMSNorm, not an nn.Linear"),
    ],
)
def test_torch_styles_without_a_counterpart(plan, problem):
    with pytest.raises(PlanError, match=problem):
        find_plan(plan, Transformer(ModelConfig()))


class FakeHub(nn.Module):
    """Looks like a Hugging Face model, as far as the translation reads one."""

    base_model_prefix = "model"

    def __init__(self, plan: dict[str, str], **config: object) -> None:
        super().__init__()
        self.config = SimpleNamespace(base_model_tp_plan=None, **config)
        self.model = nn.ModuleDict({"embed": nn.Embedding(9, 32), "attn": Attention(), "mlp": Planned(None)})
        self.head = nn.Linear(32, 9, bias=False)
        self._tp_plan = plan

    def get_input_embeddings(self):
        return self.model["embed"]

    def get_output_embeddings(self):
        return self.head


ATTENTION = {f"model.attn.{name}": "rowwise" if name == "wo" else "colwise" for name in ("wq", "wk", "wv", "wo")}


def test_hugging_face_plan():
    plan = ATTENTION | {"head": "colwise_rep", "model.absent.*": "moe_of_the_future"}
    model = nn.ModuleDict({"net": FakeHub(plan, num_attention_heads=8)})
    attention = "attention(num_heads=8, num_kv_heads=2)"
    expected = {"net.model.embed": "vocab", "net.model.attn": attention, "net.head": GATHERED}
    assert found(model) == expected
    del plan["head"]
    assert "net.head" not in found(model)
    model["net"].head.weight = model["net"].model["embed"].weight  # tied: both or neither
    assert found(model) == expected
    model["net"].model["embed"].max_norm = 1.0
    assert list(found(model)) == ["net.model.attn"]


def test_hugging_face_plan_of_the_base_model():
    model = FakeHub({}, num_attention_heads=8)
    model.config.base_model_tp_plan = {name.removeprefix("model."): style for name, style in ATTENTION.items()}
    assert list(found(model)) == ["model.embed", "model.attn"]


def test_hugging_face_styles_that_are_not_supported():
    with pytest.raises(PlanError, match="FakeHub has styles that are not supported: 'model.mlp.up': 'moe_experts'"):
        find_plan("auto", FakeHub(ATTENTION | {"model.mlp.up": "moe_experts"}, num_attention_heads=8))
    with pytest.raises(PlanError, match="the number of heads of 'model.attn' is not known"):
        find_plan("auto", FakeHub(ATTENTION))


def test_finding_a_plan_changes_nothing():
    model = Transformer(ModelConfig())
    before, state = {name: p.clone() for name, p in model.named_parameters()}, torch.get_rng_state()
    find_plan("auto", model)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert torch.equal(state, torch.get_rng_state())
