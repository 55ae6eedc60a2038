"""What does not fit is refused: by all members alike, before anything has changed, and with the way out."""

from __future__ import annotations

import pytest
import torch

from lightning_ntp.checkpoint import (
    gather_model_state,
    gather_optimizer_state,
    load_model_state,
    load_optimizer_state,
)
from lightning_ntp.engine import Member
from lightning_ntp.errors import CheckpointError
from lightning_ntp.topology import Topology
from tests.dist.checkpoint_legs import GQA, Net, assert_same, plan_for, single, trained
from tests.support.gloo import gloo_world
from tests.support.reference import make_optimizer


def test_load_lists_every_problem_and_changes_nothing():
    member, model = single()
    before = gather_model_state(member.model, member.topology, 0)
    state = Net(GQA, seed=5).state_dict()
    del state["net.norm.weight"]
    state["net.surprise"] = torch.ones(1)
    state["net.embed.weight"] = state["net.embed.weight"][:100]
    state["net.layers.0.norm1.weight"] = torch.ones(3)
    with pytest.raises(CheckpointError) as error:
        load_model_state(member.model, state)
    for word in ("net.norm.weight", "net.surprise", "(100, 32) in the file, (101, 32) in the model", "layers.0.norm1"):
        assert word in str(error.value)
    assert_same(gather_model_state(member.model, member.topology, 0), before)


def test_missing_and_unexpected_keys():
    member, _ = single()
    state = Net(GQA, seed=5).state_dict()
    del state["net.norm.weight"], state["net.lm_head.weight"]
    state["net.surprise"] = torch.ones(1)
    with pytest.raises(CheckpointError, match="(?s)net.norm.weight.*net.surprise.*strict_loading=False") as error:
        load_model_state(member.model, state)
    assert "net.lm_head.weight" in str(error.value)
    load_model_state(member.model, state, strict=False)
    found = gather_model_state(member.model, member.topology, 0)
    assert torch.equal(found["net.embed.weight"], state["net.embed.weight"])
    assert torch.equal(found["net.lm_head.weight"], Net(GQA, seed=0).net.lm_head.weight)


def local_part_for_the_whole(rank: int, world_size: int, store: str) -> None:
    """A file with one slot's part under the dense name has the right shape for that slot: it must not be loaded."""
    with gloo_world(rank, world_size, store):
        member = Member(Topology.start([2]), rank)
        model = Net(GQA, seed=0)
        member.shard(model, plan_for(GQA))
        with pytest.raises(CheckpointError, match="in the model"):
            load_model_state(member.model, model.state_dict(), strict=False)


def test_a_part_is_not_taken_for_the_whole(workers):
    workers.run(local_part_for_the_whole, 2)


class Renamed(Net):
    """An override as users write it: other names, and no ``keep_vars``."""

    def state_dict(self):
        return {f"model.{key}": value for key, value in super().state_dict().items()}


class Picked(Net):
    """An override that keeps the names: what to leave out of a file."""

    def state_dict(self):
        return {key: value for key, value in super().state_dict().items() if "lm_head" in key or key == "forwards"}


def test_overrides_of_state_dict():
    topology = Topology.start([1], 4)
    for kind in (Picked, Renamed):
        member, model = Member(topology, 0), kind(GQA, seed=0)
        member.shard(model, plan_for(GQA))
        if kind is Picked:
            assert_same(gather_model_state(member.model, topology, 0), Picked(GQA, seed=0).state_dict())
        else:
            with pytest.raises(CheckpointError, match="'net.embed.weight' under the name 'model.net.embed.weight'"):
                gather_model_state(member.model, topology, 0)


def test_hook_that_renames_keeps_its_names():
    member, model = single()

    def rename(module, state, prefix, metadata) -> None:
        for key in list(state):
            state[key.replace("net.", "")] = state.pop(key)

    model.register_state_dict_post_hook(rename)
    dense = Net(GQA, seed=0)
    dense.register_state_dict_post_hook(rename)
    assert_same(gather_model_state(member.model, member.topology, 0), dense.state_dict())


def odd_state(rank: int, world_size: int, store: str, guilty: tuple[int, ...], key: str) -> str:
    with gloo_world(rank, world_size, store):
        member = Member(Topology.start([3, 2]), rank)
        model = Net(GQA, seed=0)
        member.shard(model, plan_for(GQA))
        optimizer = make_optimizer("sgd", model.parameters())
        if rank in guilty:
            weight = model.net.embed.weight
            optimizer.state[weight][key] = torch.zeros_like(weight) if key == "moment" else torch.zeros(7, 1)
        try:
            gather_optimizer_state(member.model, optimizer, member.topology, rank)
        except CheckpointError as error:
            return str(error)
        return ""


def test_factored_state_is_refused_on_all_members(workers):
    for message in workers.run(odd_state, 5, (0, 1, 2, 3, 4), "row_var"):
        for word in ("SGD", "'row_var'", "(7, 1)", "'net.embed.weight'", "elementwise"):
            assert word in message


@pytest.mark.parametrize(("key", "word"), [("row_var", "another slot"), ("moment", "different sets")])
def test_one_odd_slot_stops_the_whole_replica(workers, key, word):
    messages = workers.run(odd_state, 5, (1,), key)
    assert word in messages[0] and word in messages[2] and messages[1]
    assert messages[3:] == ["", ""]


def test_optimizer_of_another_form_is_refused():
    member, model, optimizer = trained()
    state = gather_optimizer_state(member.model, optimizer, member.topology, 0)
    parameters = list(model.parameters())
    other = torch.optim.AdamW([{"params": parameters[:3]}, {"params": parameters[3:]}])
    with pytest.raises(CheckpointError, match=r"groups of \[\d+\] parameters, AdamW has \[3, \d+\]"):
        load_optimizer_state(member.model, other, state)
    with pytest.raises(CheckpointError, match="no 'state'"):
        load_optimizer_state(member.model, optimizer, {})


def test_optimizer_state_of_a_wrong_shape_is_refused_and_nothing_changes():
    member, _, optimizer = trained()
    state = gather_optimizer_state(member.model, optimizer, member.topology, 0)
    before = gather_optimizer_state(member.model, optimizer, member.topology, 0)
    first = state["state"][min(state["state"])]
    first["exp_avg"] = torch.zeros(100, 32)
    state["state"][4096] = {"step": torch.tensor(1.0)}
    with pytest.raises(CheckpointError, match=r"\[4096\].*'exp_avg' of shape \(100, 32\).*\(101, 32\)"):
        load_optimizer_state(member.model, optimizer, state)
    assert_same(gather_optimizer_state(member.model, optimizer, member.topology, 0), before)
