"""A run saved at one list of degrees goes on at others, and in plain torch, as if nothing had been written."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_ntp.checkpoint import (
    gather_model_state,
    gather_optimizer_state,
    load_model_state,
    load_optimizer_state,
    read_file,
    save_file,
)
from lightning_ntp.engine import Member
from lightning_ntp.errors import CheckpointError
from lightning_ntp.layout import Sharded
from lightning_ntp.parallel import ParallelPlan
from lightning_ntp.topology import Topology
from tests.support.batches import batch
from tests.support.gloo import gloo_world
from tests.support.models import ModelConfig, build, loss_fn
from tests.support.reference import OptimizerName, make_optimizer

GQA = ModelConfig(num_kv_heads=2, fused_qkv=True, fused_gate_up=True, bias=True, unused=True)
CASES: dict[str, tuple[ModelConfig, OptimizerName]] = {
    "fused-bias-unused": (GQA, "adamw"),
    "gqa-6-3-layernorm": (ModelConfig(width=24, num_heads=6, num_kv_heads=3, norm="layer", bias=True), "sgd"),
    "heads-7-tied": (ModelConfig(width=28, num_heads=7, num_kv_heads=7, tied=True), "adamw"),
}
BATCHES = tuple(tuple(range(12 * step, 12 * step + 12)) for step in range(3))


class Net(nn.Module):
    """The test transformer inside another module, with every other kind of state that a ``state_dict`` can have."""

    def __init__(self, config: ModelConfig, seed: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.net = build(config, seed, dtype)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.stats = nn.BatchNorm1d(2)
        self.extra = {"seed": seed}

    def forward(self, ids: Tensor) -> Tensor:
        self.forwards += 1
        return self.net(ids)

    def get_extra_state(self) -> dict:
        return self.extra

    def set_extra_state(self, state: dict) -> None:
        self.extra = dict(state)


def plan_for(config: ModelConfig) -> ParallelPlan:
    heads = f"attention(num_heads={config.num_heads}, num_kv_heads={config.num_kv_heads})"
    return ParallelPlan(
        {
            "net.embed": "vocab",
            "net.layers.*.attn": heads,
            "net.layers.*.mlp": "ffn",
            "net.lm_head": "colwise(gather_output=True)",
        }
    )


@dataclass(frozen=True)
class Leg:
    """A part of a training run: load, take some steps, save.

    Attributes:
        batches: Sample ids of each optimizer step.
        load: File to go on from.
        again: File for what was loaded, gathered again.
        save: File for the end.
    """

    degrees: tuple[int, ...]
    nominal: int
    batches: tuple[tuple[int, ...], ...]
    load: str = ""
    again: str = ""
    save: str = ""


@dataclass
class Told:
    """What a member has to say after a leg."""

    identity_kept: bool = True
    holds_data: list[bool] = field(default_factory=list)
    extra: dict = field(default_factory=dict)
    lr: float = 0.0


def run_leg(rank: int, world_size: int, store: str, config: ModelConfig, name: OptimizerName, leg: Leg) -> Told:
    with gloo_world(rank, world_size, store):
        topology, told = Topology.start(leg.degrees, leg.nominal), Told()
        member = Member(topology, rank)
        model = Net(config, seed=rank + (100 if leg.load else 0))
        member.shard(model, plan_for(config))
        sync = member.start_sync(bucket_cap_mb=0.02)
        optimizer = make_optimizer(name, model.parameters(), lr=0.5 if leg.load else 1e-3)
        if leg.load:
            before = list(model.parameters())
            checkpoint = read_file(leg.load)
            load_model_state(member.model, checkpoint["state_dict"])
            load_optimizer_state(member.model, optimizer, checkpoint["optimizer_states"][0])
            told.identity_kept = all(a is b for a, b in zip(before, model.parameters(), strict=True))
        if leg.again:
            told.holds_data.append(_save(member, optimizer, leg.again))
        for ids in leg.batches:
            _step(member, model, optimizer, ids)
        if leg.save:
            told.holds_data.append(_save(member, optimizer, leg.save))
        told.extra, told.lr = model.extra, optimizer.param_groups[0]["lr"]
        del sync
        member.close()
        return told


def _step(member: Member, model: nn.Module, optimizer: torch.optim.Optimizer, ids: tuple[int, ...]) -> None:
    mine = ids[member.replica :: member.topology.num_replicas]
    optimizer.zero_grad()
    tokens = batch(mine)
    loss = loss_fn(model(tokens), tokens)
    member.sync.begin(len(mine) / len(ids), sync=True)
    loss.backward()
    parameters = list(model.parameters())
    member.clip(parameters, member.vote(parameters), 1.0)
    optimizer.step()


def _save(member: Member, optimizer: torch.optim.Optimizer, path: str) -> bool:
    """Save as the strategy does; whether this member had anything to write."""
    model_state = gather_model_state(member.model, member.topology, member.rank)
    optimizer_state = gather_optimizer_state(member.model, optimizer, member.topology, member.rank)
    assert bool(model_state) == bool(optimizer_state)
    if member.is_leader:
        save_file({"state_dict": model_state, "optimizer_states": [optimizer_state]}, path)
    return bool(model_state)


def dense_from(path: Path, config: ModelConfig, name: OptimizerName) -> tuple[Net, torch.optim.Optimizer]:
    """The file in plain torch."""
    checkpoint = torch.load(path, weights_only=True)
    model = Net(config, seed=7)
    model.load_state_dict(checkpoint["state_dict"], strict=True)
    optimizer = make_optimizer(name, model.parameters(), lr=0.5)
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    return model, optimizer


def dense_step(model: Net, optimizer: torch.optim.Optimizer, ids: tuple[int, ...]) -> None:
    optimizer.zero_grad()
    tokens = batch(ids)
    loss_fn(model(tokens), tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def dense_run(config: ModelConfig, name: OptimizerName, steps: int) -> tuple[Net, torch.optim.Optimizer]:
    model = Net(config, seed=0)
    optimizer = make_optimizer(name, model.parameters())
    for ids in BATCHES[:steps]:
        dense_step(model, optimizer, ids)
    return model, optimizer


def flat(value, prefix: str = "") -> dict:
    """Leaves of nested dicts and lists by path, in order."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {path: leaf for key, part in items for path, leaf in flat(part, f"{prefix}/{key}").items()}
    return {prefix: value}


def assert_same(found, expected, rtol: float = 0.0) -> None:
    """Equal structure, order, dtypes and shapes; values bitwise, or within ``rtol`` of the largest of each kind."""
    found, expected = flat(found), flat(expected)
    assert list(found) == list(expected)
    for path, value in expected.items():
        if not isinstance(value, Tensor):
            assert found[path] == value, path
            continue
        assert (found[path].dtype, found[path].shape) == (value.dtype, value.shape), path
        if rtol:
            alike = [other for key, other in expected.items() if key.split("/")[-1] == path.split("/")[-1]]
            scale = max(other.abs().max().item() for other in alike) if path.startswith("/state/") else 1.0
            assert (found[path] - value).abs().max().item() <= rtol * scale, path
        else:
            assert torch.equal(found[path], value), path


@pytest.mark.parametrize("case", CASES)
def test_round_trip(workers, tmp_path, case):
    config, name = CASES[case]
    first = tmp_path / "first.ckpt"
    told = workers.run(run_leg, 7, config, name, Leg((4, 3), 4, BATCHES[:2], save=str(first)))
    assert [each.holds_data for each in told] == [[True]] + [[False]] * 6

    saved = torch.load(first, weights_only=True)
    dense, dense_optimizer = dense_run(config, name, steps=2)
    assert_same(saved["state_dict"], dense.state_dict(), rtol=1e-12)
    assert_same(saved["optimizer_states"][0], dense_optimizer.state_dict(), rtol=1e-12)
    assert saved["state_dict"]._metadata == dense.state_dict()._metadata

    plain, plain_optimizer = dense_from(first, config, name)
    dense_step(plain, plain_optimizer, BATCHES[2])
    for degrees, nominal in (((2, 2), 2), ((3, 1), 4), ((1,), 4)):
        again, last = tmp_path / "again.ckpt", tmp_path / "last.ckpt"
        leg = Leg(degrees, nominal, BATCHES[2:], load=str(first), again=str(again), save=str(last))
        told = workers.run(run_leg, sum(degrees), config, name, leg)
        assert_same(torch.load(again), saved)
        end = torch.load(last)
        assert_same(end["state_dict"], plain.state_dict(), rtol=1e-12)
        assert_same(end["optimizer_states"][0], plain_optimizer.state_dict(), rtol=1e-12)
        assert all(each.identity_kept and each.extra == {"seed": 0} and each.lr == 1e-3 for each in told)


def test_tied_tensors_stay_tied_in_the_file(workers, tmp_path):
    path = tmp_path / "tied.ckpt"
    workers.run(run_leg, 3, CASES["heads-7-tied"][0], "sgd", Leg((3,), 3, (), save=str(path)))
    state = torch.load(path)["state_dict"]
    assert state["net.embed.weight"].data_ptr() == state["net.lm_head.weight"].data_ptr()


def gather_dtypes(rank: int, world_size: int, store: str, path: str) -> None:
    with gloo_world(rank, world_size, store):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            member = Member(Topology.start([3, 2]), rank)
            model = Net(GQA, seed=0, dtype=dtype)
            member.shard(model, plan_for(GQA))
            optimizer = make_optimizer("sgd", model.parameters())
            for parameter in model.parameters():
                optimizer.state[parameter]["momentum_buffer"] = parameter.detach().clone()
            _save(member, optimizer, f"{path}/{dtype}.ckpt")


def test_every_dtype_bitwise(workers, tmp_path):
    workers.run(gather_dtypes, 5, str(tmp_path))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        found, dense = torch.load(tmp_path / f"{dtype}.ckpt"), Net(GQA, seed=0, dtype=dtype)
        assert_same(found["state_dict"], dense.state_dict())
        for parameter, state in zip(dense.parameters(), found["optimizer_states"][0]["state"].values(), strict=True):
            assert torch.equal(state["momentum_buffer"], parameter)


def record_traffic(rank: int, world_size: int, store: str) -> tuple[int, int, int]:
    """(collectives, bytes sent, bytes of the units that this member owns)."""
    with gloo_world(rank, world_size, store):
        member = Member(Topology.start([3, 2]), rank)
        model = Net(GQA, seed=0)
        member.shard(model, plan_for(GQA))
        member.recorder.enabled = True
        gather_model_state(member.model, member.topology, rank)
        records = [each for each in member.recorder.records if each.operation == "all_to_all"]
        owned = 0
        for each in member.model.parameters():
            if isinstance(each.layout, Sharded):
                owners = [segment.family.at(member.context.degree).owners for segment in each.layout.segments]
                rows = sum(piece.rows for piece in each.layout.pieces(member.context.degree, member.context.slot)
                           if owners[piece.segment][piece.unit] == member.context.slot)  # fmt: skip
                owned += rows * each.dense_numel // each.layout.extent * 8
        return len(member.recorder.records), sum(each.sent_bytes for each in records), owned


def test_only_the_leaders_replica_sends_and_only_what_it_owns(workers):
    told = workers.run(record_traffic, 5)
    for count, sent, owned in told[:3]:
        assert count > 1
        assert sent == owned
    assert [count for count, _, _ in told[3:]] == [0, 0]


# Refusals


def single(nominal: int = 4, config: ModelConfig = GQA, seed: int = 0) -> tuple[Member, Net]:
    """One member that needs no process group; its units lie in another order than in the dense tensors."""
    member, model = Member(Topology.start([1], nominal), 0), Net(config, seed)
    member.shard(model, plan_for(config))
    return member, model


def test_one_member_of_a_higher_nominal_degree_reorders():
    member, model = single()
    dense = Net(GQA, seed=0)
    assert not torch.equal(model.net.embed.weight, dense.net.embed.weight), "the test has no permutation to undo"
    assert_same(gather_model_state(member.model, member.topology, 0), dense.state_dict())
    load_model_state(member.model, Net(GQA, seed=5).state_dict())
    assert_same(gather_model_state(member.model, member.topology, 0), Net(GQA, seed=5).state_dict())


def test_a_gathered_state_is_a_copy():
    member, model = single()
    state = gather_model_state(member.model, member.topology, 0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    assert_same(state, Net(GQA, seed=0).state_dict())


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


def trained(name: OptimizerName = "adamw") -> tuple[Member, Net, torch.optim.Optimizer]:
    member, model = single()
    optimizer = make_optimizer(name, model.parameters())
    tokens = batch((0, 1))
    loss_fn(model(tokens), tokens).backward()
    optimizer.step()
    return member, model, optimizer


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


def test_loaded_optimizer_state_does_not_alias_the_file(tmp_path):
    member, model, optimizer = trained()
    state = gather_optimizer_state(member.model, optimizer, member.topology, 0)
    save_file(state, tmp_path / "a.ckpt")
    mapped = read_file(tmp_path / "a.ckpt")
    load_optimizer_state(member.model, optimizer, mapped)
    optimizer.step()
    assert_same(mapped, state)
    held = [value for values in optimizer.state.values() for value in values.values()]
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in held)
