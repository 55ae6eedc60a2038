"""One forward and backward of a model on unequal replicas, compared with the dense model in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ntp.engine import Member
from lightning_ntp.layout import ParameterLayout, Replicated
from lightning_ntp.parallel import ParallelPlan, check_partial_grads
from lightning_ntp.parallel.plans.auto import find_plan
from lightning_ntp.parallel.probing.probe import ShapeProbe
from lightning_ntp.parallel.shards import put_local
from lightning_ntp.topology import Topology
from tests.support.batches import batch
from tests.support.gloo import gloo_world

TOLERANCE = 1e-10


@dataclass
class Outcome:
    """What one rank saw: logits and loss of its replica's samples, the synced gradients of its local parameters."""

    replica: int
    slot: int
    logits: Tensor
    loss: float
    gradients: dict[str, Tensor]
    layouts: dict[str, ParameterLayout]
    shapes: dict[str, torch.Size]


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    output = model(tokens)
    return output if isinstance(output, Tensor) else output.logits


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def run_once(
    rank: int,
    world_size: int,
    store: str,
    make: Callable[[], nn.Module],
    plan: dict[str, str] | str,
    degrees: tuple[int, ...],
    vocab: int,
) -> Outcome:
    """One rank. Replica r takes ``degrees[r]`` samples, so that shares are unequal too."""
    with gloo_world(rank, world_size, store):
        topology = Topology.start(degrees, max(degrees))
        member = Member(topology, rank)
        model = make()
        member.shard(model, plan if isinstance(plan, ParallelPlan) else find_plan(plan, model))
        ShapeProbe(member.model).attach()
        member.start_sync(bucket_cap_mb=0.02)
        first = sum(degrees[: member.replica])
        tokens = batch(list(range(sum(degrees))), vocab)[first : first + degrees[member.replica]]
        logits = logits_of(model, tokens)
        loss = loss_of(logits, tokens)
        check_partial_grads(loss, member.model)  # no false alarm
        member.sync.begin(len(tokens) / sum(degrees), sync=True)
        loss.backward()
        parameters = list(member.model.parameters())
        outcome = Outcome(
            member.replica, member.slot, logits.detach(), loss.item(),
            {p.name: p.parameter.grad for p in parameters if p.parameter.grad is not None},
            {p.name: p.layout for p in parameters}, {p.name: p.dense_shape for p in parameters},
        )  # fmt: skip
        member.close()
        return outcome


def assert_equals_dense(
    outcomes: list[Outcome],
    make: Callable[[], nn.Module],
    degrees: tuple[int, ...],
    vocab: int,
    *,
    in_parts: bool = False,
) -> None:
    """Logits, loss and every gradient at every rank, to 1e-10 of the largest value.

    Args:
        in_parts: Whether the dense gradient is added up from the replicas' samples, as the run does it. For models that
            compute parts of their backward in fp32 whatever their dtype: there the scale of the loss decides how the
            gradient is rounded, by 1e-7 of it.
    """
    model = make()
    tokens = batch(list(range(sum(degrees))), vocab)
    logits = logits_of(model, tokens)
    loss = loss_of(logits, tokens)
    parts = tokens.split(degrees) if in_parts else (tokens,)
    dense: dict[str, Tensor] = {}
    for part in parts:
        model.zero_grad()
        loss_of(logits_of(model, part), part).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                dense[name] = dense.get(name, 0) + len(part) / len(tokens) * parameter.grad
    total = sum(degrees[o.replica] / sum(degrees) * o.loss for o in outcomes if o.slot == 0)
    assert abs(total - loss.item()) <= TOLERANCE * abs(loss.item())
    for outcome in outcomes:
        first = sum(degrees[: outcome.replica])
        assert_close(outcome.logits, logits.detach()[first : first + degrees[outcome.replica]], "logits")
        assert outcome.gradients.keys() == dense.keys()
    for replica, degree in enumerate(degrees):
        slots = [outcome for outcome in outcomes if outcome.replica == replica]
        for name, expected in dense.items():
            assert_close(whole(slots, name, degree), expected, f"gradient of {name} in replica {replica}")


def whole(slots: list[Outcome], name: str, degree: int) -> Tensor:
    """The dense gradient from its parts; all copies must be equal."""
    layout = slots[0].layouts[name]
    if isinstance(layout, Replicated):
        assert all(torch.equal(slots[0].gradients[name], other.gradients[name]) for other in slots)
        return slots[0].gradients[name]
    dense = torch.full(slots[0].shapes[name], torch.nan, dtype=torch.float64)
    for outcome in slots:
        put_local(dense, outcome.gradients[name], layout, degree, outcome.slot)
    return dense


def assert_close(value: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    assert value.shape == expected.shape, f"{what}: shape {tuple(value.shape)}, dense {tuple(expected.shape)}"
    if expected.numel():
        difference, scale = (value - expected).abs().max().item(), expected.abs().max().item()
        assert difference <= tolerance * max(scale, 1e-30), f"{what} is off by {difference:.2e} of {scale:.3g}"
