"""The fingerprint of the weights: blind to the layout, and to nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ntp.comm.exchange import Exchange
from lightning_ntp.comm.groups import GroupHandle
from lightning_ntp.engine import Member
from lightning_ntp.engine.exact import refuse_inexact
from lightning_ntp.engine.fingerprint import PARTS, Fingerprint, Turn
from lightning_ntp.engine.plain import Plain
from lightning_ntp.engine.verify import judge
from lightning_ntp.errors import ConfigError, UnsupportedError
from lightning_ntp.layout import GroupedFamily, LayoutFamily, Replicated, Segment, Sharded
from lightning_ntp.parallel import ParallelModel, ParallelParameter, TensorParallelContext, parallelize
from lightning_ntp.parallel.module import ParallelModule
from lightning_ntp.topology import Topology
from tests.dist.bare import plan_for
from tests.support.models import ModelConfig, build

NOMINAL = 4
HELD_BY_SLOT_0 = 4 * 24  # elements of gqa-bias's key projection: one head of four rows
MODELS = {
    "gqa-bias": ModelConfig(width=24, num_heads=6, num_kv_heads=3, bias=True, layers=1),
    "fused": ModelConfig(num_kv_heads=2, fused_qkv=True, fused_gate_up=True, bias=True, tied=True, layers=1),
    "few-units": ModelConfig(width=16, num_heads=2, num_kv_heads=1, vocab=7, ffn=5, norm="layer", layers=1),
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def context_at(degree: int, slot: int, nominal: int) -> TensorParallelContext:
    return TensorParallelContext.at(Exchange(GroupHandle("tensor_parallel")), degree, slot, nominal)


def cut(
    config: ModelConfig, degree: int, slot: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> ParallelModel:
    return parallelize(build(config, seed, dtype), plan_for(config), context_at(degree, slot, NOMINAL))


@functools.cache
def replica(name: str, degree: int, dtype: torch.dtype = torch.float32) -> list[ParallelModel]:
    """All slots of a replica; not to be changed."""
    return [cut(MODELS[name], degree, slot, dtype) for slot in range(degree)]


def total(models: list[ParallelModel], turn: Turn | None = None) -> list[int]:
    prints = [Fingerprint(model) for model in models]
    return sum(each.of(turn or each.everything) for each in prints).tolist()


@functools.cache
def by_turn(name: str, degree: int, dtype: torch.dtype) -> list[list[int]]:
    """The sums of a replica for every turn, and for everything."""
    models = replica(name, degree, dtype)
    first = Fingerprint(models[0])
    return [total(models, turn) for turn in [*map(first.turn, range(PARTS)), first.everything]]


def named(model: ParallelModel, name: str) -> tuple[int, ParallelParameter]:
    """(number, parameter)"""
    return next((number, param) for number, param in enumerate(model.parameters()) if param.name == name)


def flip(tensor: torch.Tensor, at: int, bit: int) -> None:
    """Flip one bit of the element at a flat position. Its own inverse."""
    position = tuple(int(index) for index in torch.unravel_index(torch.tensor(at), tensor.shape))
    integers = tensor.data.view(INTEGERS[tensor.element_size()])
    size = 8 * tensor.element_size()
    integers[position] ^= -(2 ** (size - 1)) if bit == size - 1 else 2**bit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_equal_at_any_degree(name, dtype):
    whole = by_turn(name, 1, dtype)
    assert all(own and not copies for own, copies in whole) and len({own for own, _ in whole}) > PARTS // 2
    for degree in range(2, NOMINAL + 1):
        assert by_turn(name, degree, dtype) == whole, degree


@st.composite
def segments(draw, nominal: int) -> Segment:
    if draw(st.booleans()):
        sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
        return Segment(LayoutFamily(len(sizes), nominal), tuple(sizes))
    heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return Segment(GroupedFamily(heads * group, heads, nominal), (draw(st.integers(1, 2)),) * heads)


@given(st.data(), st.integers(0, 1), st.integers(1, 5), st.sampled_from(DTYPES))
@settings(max_examples=60)
def test_equal_for_any_layout(data, dim, nominal, dtype):
    """One parameter of drawn units along either dimension, also with KV heads that several slots hold."""
    layout = Sharded(dim, tuple(data.draw(st.lists(segments(nominal), min_size=1, max_size=3))))
    dense = torch.nn.Parameter(torch.randn((layout.extent, 3) if dim == 0 else (3, layout.extent)).to(dtype))
    sums = []
    for degree in range(1, nominal + 1):
        models = []
        for slot in range(degree):
            module = ParallelModule(context_at(degree, slot, nominal))
            module.hold("weight", dense, layout)
            models.append(ParallelModel(module, module.context))
        sums.append(total(models))
    assert sums == [[sums[0][0], 0]] * nominal


def test_other_weights_give_another_fingerprint():
    config = MODELS["gqa-bias"]
    assert total([cut(config, 1, 0, seed=1)])[0] != total([cut(config, 1, 0)])[0]
    assert Fingerprint(cut(config, 1, 0)).by_parameter(Turn((0, 1, 2)))[:, 0].unique().numel() == 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_flipped_bit_is_seen(dtype):
    model = cut(MODELS["gqa-bias"], 2, 1, dtype)
    fingerprint = Fingerprint(model)
    wanted = {"layers.0.attn.q_proj.weight", "layers.0.attn.o_proj.weight", "layers.0.attn.k_proj.bias"}
    seen = set()
    for number, param in enumerate(model.parameters()):
        is_replicated = isinstance(param.layout, Replicated) and "norm" in param.name
        if param.name not in wanted and not is_replicated:
            continue
        seen.add(param.name)
        turn, tensor = Turn((number,)), param.parameter
        before = fingerprint.of(turn).tolist()
        for at in (0, tensor.numel() // 2, tensor.numel() - 1):
            for bit in range(8 * tensor.element_size()):
                flip(tensor, at, bit)
                assert fingerprint.of(turn).tolist() != before, (param.name, at, bit)
                flip(tensor, at, bit)
        assert fingerprint.of(turn).tolist() == before
    assert wanted < seen


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(bit=st.integers(0, 15), ats=st.sets(st.integers(0, HELD_BY_SLOT_0 - 1), min_size=2, max_size=4))
@settings(max_examples=30)
def test_equal_bits_that_flip_together_do_not_cancel_out(dtype, bit, ats):
    """As a sign bit would, times an even number: of some elements the same one, counted from the top."""
    model = replica("gqa-bias", 4, dtype)[0]
    number, param = named(model, "layers.0.attn.k_proj.weight")
    fingerprint, turn, bit = Fingerprint(model), Turn((number,)), 8 * dtype.itemsize - 1 - bit
    assert param.parameter.numel() == HELD_BY_SLOT_0
    before = fingerprint.of(turn).tolist()
    for at in ats:
        flip(param.parameter, at, bit)
    try:
        assert fingerprint.of(turn).tolist() != before
    finally:
        for at in ats:
            flip(param.parameter, at, bit)
    assert fingerprint.of(turn).tolist() == before


@pytest.mark.parametrize("name", ["layers.0.attn.q_proj.weight", "layers.0.attn.o_proj.weight"])
def test_exchanged_units_are_seen(name):
    model = cut(MODELS["gqa-bias"], 2, 0)
    number, param = named(model, name)
    fingerprint, turn = Fingerprint(model), Turn((number,))
    before, units = fingerprint.of(turn).tolist(), fingerprint.by_unit(number)
    one, other = param.layout.pieces(2, 0)[:2]
    a = param.parameter.data.narrow(param.layout.dim, one.local_row, one.rows)
    b = param.parameter.data.narrow(param.layout.dim, other.local_row, other.rows)
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)
    assert fingerprint.of(turn).tolist() != before
    changed = (fingerprint.by_unit(number) != units).nonzero().flatten().tolist()
    assert changed == [one.unit, other.unit]


@pytest.mark.parametrize("degree", [1, 3])
def test_memory_order_does_not_matter(degree):
    models = [cut(MODELS["fused"], degree, slot) for slot in range(degree)]
    before = total(models)
    for model in models:
        for param in model.parameters():
            if param.parameter.dim() == 2:
                param.parameter.data = param.parameter.data.t().contiguous().t()
    assert total(models) == before


def test_a_deviating_copy_inside_a_replica_is_seen():
    """Both slots hold the only KV head; slot 0 counts it, and the norm, for the replica."""
    models = [cut(MODELS["few-units"], 2, slot) for slot in range(2)]
    expected = total(models)
    for name in ("layers.0.attn.k_proj.weight", "norm.weight"):
        _, param = named(models[1], name)
        flip(param.parameter, 3, 0)
        changed = total(models)
        assert changed[0] == expected[0] and changed[1] != 0, name
        flip(param.parameter, 3, 0)
    _, owner = named(models[0], "norm.weight")
    flip(owner.parameter, 3, 31)
    assert total(models)[0] != expected[0] and total(models)[1] != 0


@pytest.mark.parametrize("name", sorted(MODELS))
def test_units_are_alike_wherever_they_are_held(name):
    fingerprint = Fingerprint(replica(name, 1)[0])
    for number, param in enumerate(replica(name, 1)[0].parameters()):
        whole = fingerprint.by_unit(number)
        assert whole.sum() == fingerprint.of(Turn((number,)))[0], param.name
        holders = fingerprint.holders(number, 3)
        for slot, model in enumerate(replica(name, 3)):
            held = Fingerprint(model).by_unit(number)
            assert held.tolist() == [h if slot in of else 0 for h, of in zip(whole.tolist(), holders, strict=True)]


def test_every_parameter_has_its_turn():
    fingerprint = Fingerprint(replica("gqa-bias", 1)[0])
    turns = [fingerprint.turn(count).numbers for count in range(PARTS)]
    assert len(set(turns)) == PARTS and sorted(sum(turns, ())) == list(fingerprint.everything.numbers)
    assert fingerprint.turn(PARTS).numbers == turns[0]


def test_optimizer_states_are_part_of_everything():
    model = cut(MODELS["gqa-bias"], 2, 0)
    optimizer = torch.optim.AdamW(model.module.parameters())
    for param in model.parameters():
        param.parameter.grad = torch.ones_like(param.parameter)
    fingerprint = Fingerprint(model, [optimizer])
    without = fingerprint.of(fingerprint.everything).tolist()
    optimizer.step()
    before, rolling = fingerprint.of(fingerprint.everything).tolist(), fingerprint.of(fingerprint.turn(0)).tolist()
    assert before != without
    first = next(model.parameters()).parameter
    flip(optimizer.state[first]["exp_avg_sq"], 0, 0)
    assert fingerprint.of(fingerprint.everything).tolist() != before
    assert fingerprint.of(fingerprint.turn(0)).tolist() == rolling


@pytest.mark.parametrize(
    ("copies", "named", "is_certain"),
    [
        ([{0: 1, 1: 1, 2: 2}, {3: 1, 4: 1}], {2}, True),
        ([{0: 1, 1: 2}], {0, 1}, False),
        ([{0: 1, 1: 2, 2: 3}], {0, 1, 2}, False),
        ([{0: 1, 1: 1, 2: 2, 3: 2}], {0, 1, 2, 3}, False),
        ([{0: 1, 1: 1, 2: 1, 3: 2}, {1: 5, 3: 6}], {3}, True),  # its other unit has two holders
        ([{0: 1, 1: 1, 2: 2}, {3: 5, 4: 6}], {2, 3, 4}, False),
        ([{0: 1, 1: 1}], set(), False),
        ([], set(), False),
    ],
)  # fmt: skip
def test_judge(copies, named, is_certain):
    assert judge(copies) == (named, is_certain)


@given(st.integers(3, 9), st.data())
def test_judge_names_whoever_deviates_from_the_others(members, data):
    bad = data.draw(st.sets(st.integers(0, members - 1), max_size=(members - 1) // 2))
    copies = [{m: (m if m in bad else -1) for m in range(members)}]
    assert judge(copies) == (bad, bool(bad))


def weights(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(5, 3, dtype=dtype))]


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: torch.optim.AdamW(weights()),
        lambda: torch.optim.AdamW(weights(torch.float64), amsgrad=True),
        lambda: torch.optim.AdamW(weights(torch.bfloat16), foreach=True),
        lambda: torch.optim.SGD(weights(), lr=0.0, momentum=0.9, weight_decay=0.1),
    ],
)  # fmt: skip
def test_optimizers_that_do_not_look_at_the_shape(optimizer):
    refuse_inexact([optimizer()], "verify_every_n_steps=1")


@pytest.mark.parametrize(
    ("optimizer", "way_out"),
    [
        (lambda: torch.optim.AdamW(weights(), fused=True), "fused=False"),
        (lambda: torch.optim.SGD(weights(torch.bfloat16), lr=1e-3, momentum=0.9, weight_decay=0.1), "float32"),
    ],
)  # fmt: skip
def test_optimizers_that_look_at_the_shape_are_refused(optimizer, way_out):
    with pytest.raises(UnsupportedError, match=rf"verify_every_n_steps=1 compares.*{way_out}"):
        refuse_inexact([optimizer()], "verify_every_n_steps=1")


def lone_engine(every: object, optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> Plain:
    engine = Plain(Member(Topology.start((1,)), 0))
    engine.member.cut(build(MODELS["few-units"], 0, torch.float32), plan_for(MODELS["few-units"]))
    engine.verify_every_n_steps = every
    engine.own([optimizer(list(engine.member.model.module.parameters()))])
    return engine


@pytest.mark.parametrize("every", [0, -1, 0.5, "2"])
def test_the_number_of_steps_is_checked(every):
    with pytest.raises(ConfigError, match=f"verify_every_n_steps={every!r} must be a whole number"):
        lone_engine(every, torch.optim.AdamW)


def test_equal_degrees_may_have_any_optimizer():
    lone_engine(1, lambda parameters: torch.optim.AdamW(parameters, fused=True))
