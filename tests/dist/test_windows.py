"""Windows that are not one loss and one optimizer: several backward passes, several optimizers, unused parameters."""

from __future__ import annotations

import torch
from torch import nn

from lightning_ntp.data.cut import CutRule, Extent, cut_window
from lightning_ntp.engine import Member
from lightning_ntp.topology import Topology
from tests.dist.bare import plan_for
from tests.support.batches import batch
from tests.support.gloo import gloo_world
from tests.support.models import ModelConfig, Transformer, build, loss_fn

CONFIG = ModelConfig(num_kv_heads=2, layers=1)
STEPS, SIZE = 4, 8


def losses(model: Transformer, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two losses that touch different parts: the whole model, and the embedding with the last norm and the head."""
    whole = loss_fn(model(tokens), tokens)
    shallow = loss_fn(model.lm_head(model.norm(model.embed(tokens))), tokens)
    return whole, shallow


def optimizers(model: Transformer, count: int) -> list[torch.optim.Optimizer]:
    if count == 1:
        return [torch.optim.AdamW(model.parameters(), lr=1e-3)]
    layers = list(model.layers.parameters())
    inside = set(layers)
    return [
        torch.optim.AdamW(layers, lr=1e-3),
        torch.optim.AdamW([p for p in model.parameters() if p not in inside], lr=1e-3),
    ]


def dense(count: int, both_before_steps: bool) -> dict[str, torch.Tensor]:
    model = build(CONFIG)
    chosen = optimizers(model, count)
    for step in range(STEPS):
        model.zero_grad()
        whole, shallow = losses(model, batch(range(step * SIZE, (step + 1) * SIZE)))
        _backward_and_step(whole, shallow, chosen, both_before_steps, lambda optimizer: None)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _backward_and_step(whole, shallow, chosen, both_before_steps, vote) -> None:
    whole.backward()
    if not both_before_steps:
        vote(chosen[0])
        chosen[0].step()
        chosen[0].zero_grad()
    shallow.backward()
    for optimizer in chosen if both_before_steps else chosen[1:]:
        vote(optimizer)
        optimizer.step()


def train(rank: int, world_size: int, store: str, count: int, both_before_steps: bool) -> dict[str, torch.Tensor]:
    from lightning_ntp.checkpoint import gather_model_state

    with gloo_world(rank, world_size, store):
        topology = Topology.start([4, 3])
        member = Member(topology, rank)
        model = build(CONFIG)
        member.shard(model, plan_for(CONFIG))
        member.start_sync(bucket_cap_mb=0.01)
        chosen = optimizers(model, count)
        window = cut_window(CutRule((5, 3), 1), Extent(SIZE), start=0, index=0)
        for step in range(STEPS):
            model.zero_grad()
            ids = [step * SIZE + position for position in window.span(member.replica, 0)]
            whole, shallow = losses(model, batch(ids))
            member.sync.begin(len(ids) / SIZE, sync=True)
            _backward_and_step(
                whole, shallow, chosen, both_before_steps, lambda o: member.vote(o.param_groups[0]["params"])
            )
        state = gather_model_state(member.model, topology, rank)
        member.close()
        return state


def check(workers, count: int, both_before_steps: bool) -> None:
    reference = dense(count, both_before_steps)
    state = workers.run(train, 7, count, both_before_steps)[0]
    scale = max(tensor.abs().max() for tensor in reference.values())
    for name, tensor in reference.items():
        assert (state[name] - tensor).abs().max() <= 1e-12 * scale, name


def test_two_backward_passes_before_one_step(workers):
    check(workers, 1, True)


def test_two_optimizers_over_disjoint_parameters(workers):
    check(workers, 2, True)


def test_an_optimizer_steps_between_two_backward_passes(workers):
    check(workers, 2, False)


def unused(rank: int, world_size: int, store: str) -> list[bool]:
    """Which gradients are None after the vote, where only replica 1 uses the middle layer."""
    with gloo_world(rank, world_size, store):
        member = Member(Topology.start([2, 1]), rank)
        model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in ("used", "sometimes", "never")})
        from lightning_ntp.parallel import ParallelPlan

        member.shard(model, ParallelPlan({}))
        member.start_sync()
        y = model["used"](torch.ones(1, 3))
        if member.replica == 1:
            y = y + model["sometimes"](torch.ones(1, 3))
        member.sync.begin(0.5, sync=True)
        y.sum().backward()
        member.vote(list(model.parameters()))
        result = [parameter.grad is None for parameter in model.parameters()]
        member.close()
        return result


def test_a_parameter_unused_everywhere_keeps_none(workers):
    assert workers.run(unused, 3) == [[False, False, True]] * 3


def grad_between(rank: int, world_size: int, store: str) -> list[bool]:
    """``autograd.grad`` between backward and step leaves ``.grad`` alone; a graph of gradients is not kept."""
    from lightning_ntp.parallel import ParallelPlan

    with gloo_world(rank, world_size, store):
        member = Member(Topology.start([2, 1]), rank)
        model = nn.Linear(3, 3)
        member.shard(model, ParallelPlan({}))
        member.start_sync()
        member.sync.begin(0.5, sync=True)
        loss = model(torch.ones(1, 3)).square().sum()
        loss.backward(create_graph=True)
        synced = [parameter.grad.clone() for parameter in model.parameters()]
        torch.autograd.grad(model(torch.ones(1, 3)).sum(), list(model.parameters()))
        kept = [parameter.grad for parameter in model.parameters()]
        member.close()
        return [torch.equal(a, b) and not b.requires_grad for a, b in zip(synced, kept, strict=True)]


def test_autograd_grad_leaves_synced_gradients_alone(workers):
    assert workers.run(grad_between, 3) == [[True, True]] * 3
