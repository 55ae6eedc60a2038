"""A joiner's optimizers become like the others'; what cannot is refused, and nothing has changed then."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim

from lightning_ntp.comm.exchange import Exchange
from lightning_ntp.comm.groups import GroupHandle
from lightning_ntp.errors import MembershipError, UnsupportedError
from lightning_ntp.parallel import ParallelPlan, TensorParallelContext, parallelize
from lightning_ntp.reshard import Place, ShardKeeper, check_alike, digest_of, held_from_json, held_to_json
from lightning_ntp.reshard.values import decode, encode

PLACE = Place(0, 2, 1)


class Model(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up = nn.Linear(4, width)
        self.down = nn.Linear(width, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))


def keeper(
    make: Callable[[nn.Module], optim.Optimizer | list[optim.Optimizer]],
    steps: int = 0,
    model: nn.Module | None = None,
    place: Place | None = PLACE,
    plan: str = "colwise",
) -> ShardKeeper:
    """Of a member that has taken some steps; ``make``'s optimizers are its ``optimizers``."""
    model = model or Model()
    context = TensorParallelContext.at(Exchange(GroupHandle("alone")), 2, 1, 2)
    parallel = parallelize(model, ParallelPlan({"up": plan, "down": "rowwise"}), context)
    made = make(model)
    optimizers = made if isinstance(made, list) else [made]
    result = ShardKeeper(parallel, optimizers, place)
    for step in range(steps):
        for parameter in model.parameters():
            if parameter is not model.down.bias:
                parameter.grad = torch.full_like(parameter, step + 0.1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    result.model, result.optimizers = model, optimizers
    return result


def adamw(model: nn.Module, **options) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), **{"lr": 1e-3, **options})


OPTIMIZERS = {
    "adamw": (adamw, lambda m: adamw(m, lr=0.5, betas=(0.1, 0.2), weight_decay=7)),
    "sgd": (lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9),) * 2,
    "sgd-without-state": (lambda m: optim.SGD(m.parameters(), lr=0.1), lambda m: optim.SGD(m.parameters(), lr=1)),
    "asgd": (lambda m: optim.ASGD(m.parameters()),) * 2,
    "adagrad": (lambda m: optim.Adagrad(m.parameters()),) * 2,
    "two": (lambda m: [optim.SGD(m.up.parameters(), lr=0.1), optim.AdamW(m.down.parameters())],) * 2,
    "the-same-parameters-twice": (lambda m: [optim.Adam(m.parameters()), optim.AdamW(m.up.parameters())],) * 2,
    "names": (lambda m: optim.AdamW(m.named_parameters(), lr=0.1), lambda m: optim.AdamW(m.named_parameters())),
}


class TestAdopt:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    @pytest.mark.parametrize("steps", [0, 2])
    def test_makes_a_joiner_alike(self, name, steps):
        theirs, ours = OPTIMIZERS[name]
        veteran, joiner = keeper(theirs, steps), keeper(ours, place=None, steps=3 - steps)
        text = json.dumps(veteran.schema())
        joiner.adopt(json.loads(text))
        assert json.dumps(joiner.schema()) == text and digest_of(joiner.schema()) == digest_of(veteran.schema())
        joiner.check(json.loads(text))
        for mine, other in zip(joiner.optimizers, veteran.optimizers, strict=True):
            states = zip(joiner.model.parameters(), veteran.model.parameters(), strict=True)
            for p, q in states:
                assert mine.state.get(p, {}).keys() == other.state.get(q, {}).keys()
                for key, value in other.state.get(q, {}).items():
                    assert mine.state[p][key].shape == value.shape and mine.state[p][key].dtype == value.dtype
                    assert value.dim() or torch.equal(mine.state[p][key], value)
            assert (joiner.model.down.bias in mine.state) == (veteran.model.down.bias in other.state), "never made"

    def test_changes_groups_in_place(self):
        veteran, joiner = (keeper(lambda m, lr=lr: adamw(m, lr=torch.tensor(lr), foreach=False)) for lr in (0.25, 1.0))
        schedulers = [optim.lr_scheduler.StepLR(k.optimizers[0], 1, gamma=0.5) for k in (veteran, joiner)]
        (group,) = joiner.optimizers[0].param_groups
        rate = group["lr"]
        veteran.optimizers[0].step()
        schedulers[0].step()
        joiner.adopt(veteran.schema())
        assert joiner.optimizers[0].param_groups == [group] and group["lr"] is rate and rate.item() == 0.125
        joiner.optimizers[0].step()
        schedulers[1].step()
        assert rate.item() == 0.0625 and group["initial_lr"].item() == 0.25

    def test_takes_over_what_is_frozen(self):
        veteran, joiner = keeper(adamw), keeper(adamw)
        veteran.model.up.weight.requires_grad_(False)
        joiner.model.down.weight.requires_grad_(False)
        joiner.adopt(veteran.schema())
        mine, theirs = ([p.requires_grad for p in each.model.parameters()] for each in (joiner, veteran))
        assert mine == theirs and theirs.count(False) == 1

    def test_keeps_what_it_holds_already(self):
        veteran = keeper(adamw, steps=2)
        before = {p: dict(state) for p, state in veteran.optimizers[0].state.items()}
        veteran.adopt(veteran.schema())
        for parameter, state in before.items():
            if parameter.dim():  # a parameter without dimensions has scalars only
                assert veteran.optimizers[0].state[parameter]["exp_avg"] is state["exp_avg"]

    def test_sees_a_group_that_was_added_later(self):
        def first_layer(model):
            return optim.SGD(model.up.parameters(), lr=0.1, momentum=0.9)

        veteran, joiner = keeper(first_layer), keeper(first_layer, place=None)
        for each, lr in ((veteran, 1), (joiner, 9)):
            each.optimizers[0].add_param_group({"params": list(each.model.down.parameters()), "lr": lr})
        veteran.model.down.weight.grad = torch.ones_like(veteran.model.down.weight)
        veteran.optimizers[0].step()
        joiner.adopt(veteran.schema())
        assert "momentum_buffer" in joiner.optimizers[0].state[joiner.model.down.weight]
        assert joiner.optimizers[0].param_groups[1]["lr"] == 1


class Opaque(nn.Module):
    def __call__(self) -> None: ...


def with_option(**options) -> Callable[[nn.Module], optim.Optimizer]:
    def make(model: nn.Module) -> optim.Optimizer:
        optimizer = adamw(model)
        optimizer.param_groups[0].update(options)
        return optimizer

    return make


class TestOptions:
    def test_of_the_same_type_stay_the_joiners_own(self):
        mine = Opaque()
        veteran = keeper(with_option(closure=Opaque(), both=[Opaque(), 2]))
        joiner = keeper(with_option(closure=mine, both=[mine, 1]))
        joiner.adopt(veteran.schema())
        (group,) = joiner.optimizers[0].param_groups
        assert group["closure"] is mine and group["both"] == [mine, 2]

    @pytest.mark.parametrize("own", [with_option(closure=print), with_option(), with_option(closure=3)])
    def test_of_another_type_are_refused(self, own):
        veteran, joiner = keeper(with_option(closure=Opaque())), keeper(own)
        with pytest.raises(UnsupportedError, match="parameter group 0: 'closure' is a .*Opaque at the other members"):
            joiner.adopt(veteran.schema())

    def test_that_are_large_tensors_are_refused_at_start(self):
        with pytest.raises(UnsupportedError, match=r"'rates' is a tensor of shape \(3,\)"):
            keeper(with_option(rates=torch.ones(3)))

    @pytest.mark.parametrize(
        ("theirs", "ours", "message"),
        [
            ({}, {"extra": 1}, "has the option 'extra'"),
            ({"lr": torch.tensor(0.1)}, {"lr": 0.1}, "'lr' is 0.1 here, tensor"),
            ({"lr": 0.1}, {"lr": torch.tensor(0.1)}, "'lr' is tensor.* here, 0.1 at"),
        ],
    )
    def test_that_only_one_has_are_refused(self, theirs, ours, message):
        veteran, joiner = keeper(with_option(**theirs)), keeper(with_option(**ours))
        with pytest.raises(MembershipError, match=message):
            joiner.adopt(veteran.schema())


class Odd(optim.SGD):
    """An SGD with a state that cannot move, once it has taken a step; it cannot be tried out."""

    def __init__(self, params, value: object, needed: object) -> None:
        super().__init__(params, lr=0.1)
        self._value = value

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["odd"] = self._value


def stepped(optimizer: optim.Optimizer) -> optim.Optimizer:
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("value", [Opaque(), torch.ones(2, 2), torch.ones(3).to_sparse(), torch.tensor(1j), {1: 2}])
def test_a_state_that_cannot_move_is_refused_when_it_is_there(value):
    odd = keeper(lambda m: Odd(m.parameters(), value, None))
    odd.optimizers[0].step()
    with pytest.raises(UnsupportedError, match="odd.* fault_tolerance=False"):
        odd.schema()
    with pytest.raises(UnsupportedError, match="odd"):
        keeper(lambda m: stepped(Odd(m.parameters(), value, None)))


@pytest.mark.parametrize("value", [3, 2.5, True, None, "text", [1, 2.0], {"a": (1, None)}, torch.ones(1, 1)])
def test_other_states_are_scalars(value):
    veteran, joiner = (keeper(lambda m: Odd(m.parameters(), value, None)) for _ in range(2))
    veteran.optimizers[0].step()
    joiner.adopt(json.loads(json.dumps(veteran.schema())))
    assert joiner.optimizers[0].state[joiner.model.up.weight]["odd"] == value


class Wider(Model):
    def __init__(self) -> None:
        super().__init__(width=8)


class Renamed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.factor = self.scale
        del self.scale


class More(Model):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(1, 1)


DIFFERENT = {
    "shape": (Wider, "colwise", r"parameter 1 is 'up.weight' of shape \(6, 4\) .*and 'up.weight' of shape \(8, 4\)"),
    "name": (Renamed, "colwise", "parameter 0 is 'scale' of .* and 'factor' of"),
    "more": (More, "colwise", "is missing at the other members and 'last.weight'"),
    "dtype": (lambda: Model().double(), "colwise", "parameter 0 is 'scale' .* dtype float32 at .* dtype float64 here"),
    "plan": (Model, "replicate", "'up.weight', is sharded in another way"),
}


class TestDifferences:
    @pytest.mark.parametrize("what", DIFFERENT)
    def test_of_models_are_named(self, what):
        model, plan, message = DIFFERENT[what]
        joiner = keeper(adamw, model=model(), place=None, plan=plan)
        before = digest_of(joiner.schema())
        with pytest.raises(MembershipError, match=message):
            joiner.adopt(keeper(adamw, steps=1).schema())
        with pytest.raises(MembershipError, match=message):
            joiner.check(keeper(adamw).schema())
        assert digest_of(joiner.schema()) == before

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda m: optim.Adam(m.parameters()), r"optimizer 0 \(Adam\) is a torch.optim.adamw.AdamW"),
            (lambda m: [adamw(m), adamw(m)], "have 1 optimizers, this one 2"),
            (lambda m: adamw_groups(m, [m.up], [m.down]), "has 2 parameter groups, 1 at the other members"),
            (lambda m: optim.AdamW(reversed(list(m.parameters()))), "has down.bias where the other members have scale"),
            (lambda m: optim.AdamW(m.up.parameters()), "has up.weight where the other members have scale"),
        ],
    )
    def test_of_optimizers_are_named(self, make, message):
        joiner = keeper(make)
        with pytest.raises(MembershipError, match=message):
            joiner.adopt(keeper(adamw, steps=1).schema())

    def test_of_scalars_are_named(self):
        one, other = keeper(adamw, steps=2), keeper(adamw, steps=3)
        with pytest.raises(MembershipError, match=r"schema.optimizers\[0\].states\[0\].*step"):
            other.check(one.schema())
        digests = {"r0.s0": digest_of(one.schema()), "r0.s1": digest_of(one.schema())}
        check_alike(digests)
        with pytest.raises(MembershipError, match="^r1.s0: .* differ from those of r0.s0"):
            check_alike({**digests, "r1.s0": digest_of(other.schema())})

    @pytest.mark.parametrize(
        "broken", [None, [], {}, {"parameters": [], "optimizers": [3]}, {"parameters": [[1]], "optimizers": []}]
    )
    def test_what_is_no_schema_is_refused(self, broken):
        with pytest.raises(MembershipError):
            keeper(adamw).adopt(broken)


def adamw_groups(model: nn.Module, *parts: list[nn.Module]) -> optim.Optimizer:
    return optim.AdamW([{"params": [p for module in part for p in module.parameters()]} for part in parts])


def test_a_parameter_that_is_no_part_of_the_model_is_refused():
    with pytest.raises(UnsupportedError, match=r"parameter of shape \(2,\) is no part of the model"):
        keeper(lambda m: optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(plain)
def test_values_are_exact(value):
    again = decode(json.loads(json.dumps(encode(value, "it"))), None, torch.device("cpu"), "it")
    assert repr(again) == repr(value)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "int64", "bool"])
def test_one_element_tensors_are_exact(name):
    dtype = getattr(torch, name)
    for number in (1 / 3, 0.0, -2.0**-20, math.inf) if dtype.is_floating_point else (1, 0):
        tensor = torch.full((1, 1), number, dtype=dtype)
        again = decode(json.loads(json.dumps(encode(tensor, "it"))), None, torch.device("cpu"), "it")
        assert torch.equal(again, tensor) and again.dtype == dtype


def test_a_joiner_holds_nothing_until_it_has_moved():
    assert keeper(adamw, place=None).held() == () == held_from_json(held_to_json(())) == held_from_json(None)
    held = keeper(adamw).held()
    assert held == ((PLACE,),) * 5 == held_from_json(json.loads(json.dumps(held_to_json(held))))
    half = (*held[:2], (), ())
    assert held_from_json(json.loads(json.dumps(held_to_json(half)))) == half


def test_an_optimizer_that_is_not_elementwise_is_refused_before_its_first_step():
    with pytest.raises(UnsupportedError, match="optimizer Adafactor keeps 'row_var'"):
        keeper(lambda m: optim.Adafactor(m.parameters()))
