"""A training run in legs, each at its own degrees with a file in between; and the same in plain torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

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
            told.holds_data.append(save(member, optimizer, leg.again))
        for ids in leg.batches:
            _step(member, model, optimizer, ids)
        if leg.save:
            told.holds_data.append(save(member, optimizer, leg.save))
        told.extra, told.lr = model.extra, optimizer.param_groups[0]["lr"]
        del sync
        member.close()
        return told


def _step(member: Member, model: nn.Module, optimizer: torch.optim.Optimizer, ids: tuple[int, ...]) -> None:
    mine = ids[member.replica :: member.topology.num_replicas]
    optimizer.zero_grad()
    tokens = batch(mine, model.net.config.vocab)
    loss = loss_fn(model(tokens), tokens)
    member.sync.begin(len(mine) / len(ids), sync=True)
    loss.backward()
    parameters = list(model.parameters())
    member.clip(parameters, member.vote(parameters), 1.0)
    optimizer.step()


def save(member: Member, optimizer: torch.optim.Optimizer, path: str) -> bool:
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
    tokens = batch(ids, model.net.config.vocab)
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


def single(nominal: int = 4, config: ModelConfig = GQA, seed: int = 0) -> tuple[Member, Net]:
    """One member that needs no process group; its units lie in another order than in the dense tensors."""
    member, model = Member(Topology.start([1], nominal), 0), Net(config, seed)
    member.shard(model, plan_for(config))
    return member, model


def trained(name: OptimizerName = "adamw") -> tuple[Member, Net, torch.optim.Optimizer]:
    member, model = single()
    optimizer = make_optimizer(name, model.parameters())
    tokens = batch((0, 1))
    loss_fn(model(tokens), tokens).backward()
    optimizer.step()
    return member, model, optimizer
