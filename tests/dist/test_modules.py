"""Each parallel module against the dense one in fp64: output, gradient of the input, gradients of the parameters.

A rank holds the dense modules too, so it compares for itself. At degree 8, seven heads, a feed-forward of 5 columns and
a vocabulary of 7 leave slots empty.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ntp.engine import Member
from lightning_ntp.errors import PlanError
from lightning_ntp.parallel import ParallelPlan, parallelize, vocab_parallel_cross_entropy
from lightning_ntp.parallel.shards import take_local
from lightning_ntp.topology import Topology
from tests.dist.once import assert_close
from tests.support.gloo import gloo_world
from tests.support.models import MLP, Attention, ModelConfig

DEGREES = [(4, 3), (8,), (1,)]
TOLERANCE = 1e-12


@dataclass(frozen=True)
class Check:
    """A module, its plan, and an input: the number of features, or of tokens if ``vocab``."""

    make: Callable[[], nn.Module]
    plan: dict[str, str]
    features: int = 24
    vocab: int = 0


class Tied(nn.Module):
    """Table and head with one weight, as a language model without layers."""

    def __init__(self, vocab: int, padding_idx: int | None = None) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(vocab, 12, padding_idx=padding_idx), nn.Linear(12, vocab, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens).tanh())


def _layer(rows: int, bias: bool = True) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(24, rows, bias=bias))


def _pair(inner: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(24, inner), nn.GELU(), nn.Linear(inner, 24))


def _table(vocab: int, padding_idx: int | None = None) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Embedding(vocab, 12, padding_idx=padding_idx))


def _block(kind: type[nn.Module], **sizes: object) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(kind(ModelConfig(**sizes)))


def checks() -> dict[str, Check]:
    gathered, tied = {"0": "colwise(gather_output=True)"}, {"table": "vocab", "head": "colwise(gather_output=True)"}
    closed = {"0": "colwise(gather_output=True)", "2": "rowwise(split_input=True)"}
    units = {"0": "colwise(units=7)", "2": "rowwise(units=7)"}
    heads_7 = dict(width=28, num_heads=7, num_kv_heads=7, bias=True)
    return {
        "column gathered": Check(_layer(44), gathered),
        "column gathered, 5 rows": Check(_layer(5, bias=False), gathered),
        "row splits its input": Check(_layer(10), {"0": "rowwise(split_input=True)"}),
        "gathered, then split": Check(_pair(44), closed),
        "pair": Check(_pair(44), {"0": "colwise", "2": "rowwise"}),
        "pair of 5": Check(_pair(5), {"0": "colwise", "2": "rowwise"}),
        "pair of 7 heads": Check(_pair(28), units),
        "ffn": Check(_block(MLP, width=24, num_heads=8, num_kv_heads=8, head_dim=2, bias=True), {"0": "ffn"}),
        "ffn of 5": Check(_block(MLP, width=24, head_dim=2, ffn=5, bias=True), {"0": "ffn"}),
        "ffn fused": Check(_block(MLP, width=24, head_dim=2, fused_gate_up=True, bias=True), {"0": "ffn"}),
        "attention of 7": Check(_block(Attention, **heads_7), {"0": "attention(7)"}, 28),
        "attention of 7, fused": Check(_block(Attention, fused_qkv=True, **heads_7), {"0": "attention(7)"}, 28),
        "table": Check(_table(101), {"0": "vocab"}, vocab=101),
        "table of 7 with padding": Check(_table(7, padding_idx=3), {"0": "vocab"}, vocab=7),
        "tied": Check(lambda: Tied(101), tied, vocab=101),
        "tied, 7 tokens": Check(lambda: Tied(7), tied, vocab=7),
    }


def compare(rank: int, world_size: int, store: str, degrees: tuple[int, ...]) -> list[str]:
    """One rank: all checks; returns their names."""
    with gloo_world(rank, world_size, store):
        member = Member(Topology.start(degrees, max(degrees)), rank)
        done = []
        for name, check in checks().items():
            torch.manual_seed(1)
            dense = check.make().double()
            with torch.no_grad():
                for parameter in dense.parameters():
                    parameter.uniform_(-1, 1)
            inputs = torch.randint(check.vocab, (3, 5)) if check.vocab else torch.randn(3, 5, check.features).double()
            _compare(name, dense, ParallelPlan(check.plan), inputs, member)
            done.append(name)
        return done


def _compare(name: str, dense: nn.Module, plan: ParallelPlan, inputs: Tensor, member: Member) -> None:
    model = parallelize(copy.deepcopy(dense), plan, member.context)
    results = []
    for module in (dense, model.module):
        given = inputs.clone().requires_grad_(inputs.is_floating_point())
        output = module(given)
        torch.manual_seed(2)
        output.backward(torch.randn(output.shape, dtype=torch.float64))
        results.append((output.detach(), given.grad))
    assert_close(results[1][0], results[0][0], f"{name}: output", TOLERANCE)
    if inputs.is_floating_point():
        assert_close(results[1][1], results[0][1], f"{name}: gradient of the input", TOLERANCE)
    expected = dict(dense.named_parameters())
    for parameter in model.parameters():
        whole = expected[parameter.name].grad
        local = take_local(whole, parameter.layout, member.context.degree, member.context.slot)
        grad = parameter.parameter.grad
        assert grad is not None, f"{name}: {parameter.name} has no gradient"  # also on an empty slot
        scale = whole.abs().max()
        assert_close(grad / scale, local / scale, f"{name}: gradient of {parameter.name}", TOLERANCE)


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_modules(workers, degrees):
    assert workers.run(compare, sum(degrees), degrees) == [list(checks())] * sum(degrees)


def cross_entropy(rank: int, world_size: int, store: str, degrees: tuple[int, ...], vocab: int) -> None:
    """One rank: the loss of local logits and all gradients, for each way to reduce."""
    with gloo_world(rank, world_size, store):
        member = Member(Topology.start(degrees, max(degrees)), rank)
        for reduction in ("mean", "sum", "none"):
            torch.manual_seed(3)
            dense = nn.ModuleDict({"table": nn.Embedding(vocab, 12), "head": nn.Linear(12, vocab)}).double()
            plan = ParallelPlan({"table": "vocab", "head": "vocab"})
            model = parallelize(copy.deepcopy(dense), plan, member.context)
            tokens, target = torch.randint(vocab, (3, 6)), torch.randint(vocab, (3, 6))
            target[0, 2:] = target[2, 0] = -7
            weights = torch.randn(3, 6).double() if reduction == "none" else torch.ones(()).double()
            losses, hidden_grads = [], []
            for module in (dense, model.module):
                hidden = module["table"](tokens) * 30.0  # large logits: the softmax must be shifted
                hidden.retain_grad()
                logits = module["head"](hidden)
                loss = vocab_parallel_cross_entropy(
                    logits, target, module["head"], ignore_index=-7, reduction=reduction
                )
                (loss * weights).sum().backward()
                losses.append(loss.detach())
                hidden_grads.append(hidden.grad)
            assert_close(losses[1], losses[0], f"{reduction}: loss", TOLERANCE)
            assert_close(hidden_grads[1], hidden_grads[0], f"{reduction}: gradient of the hidden states", TOLERANCE)
            for parameter in model.parameters():
                whole = dict(dense.named_parameters())[parameter.name].grad
                local = take_local(whole, parameter.layout, member.context.degree, member.context.slot)
                scale = whole.abs().max()
                grad = parameter.parameter.grad
                assert_close(grad / scale, local / scale, f"{reduction}: gradient of {parameter.name}", TOLERANCE)


@pytest.mark.parametrize(("degrees", "vocab"), [((4, 3), 101), ((8,), 7)], ids=str)
def test_cross_entropy_of_local_logits(workers, degrees, vocab):
    workers.run(cross_entropy, sum(degrees), degrees, vocab)


def unknown_tokens(rank: int, world_size: int, store: str) -> list[str]:
    """A token that is none: -1 as the padding of somebody else's labels."""
    with gloo_world(rank, world_size, store):
        member = Member(Topology.start((2,), 2), rank)
        plan = ParallelPlan({"table": "vocab", "head": "vocab"})
        dense = nn.ModuleDict({"table": nn.Embedding(9, 4), "head": nn.Linear(4, 9)})
        model = parallelize(dense, plan, member.context).module
        logits = model["head"](model["table"](torch.arange(3)))
        told = []
        for wrong in (-1, 9):
            tokens = torch.tensor([0, 1, wrong])
            for call in (model["table"], lambda target: vocab_parallel_cross_entropy(logits, target, model["head"])):
                with pytest.raises(IndexError) as error:
                    call(tokens)  # before any collective
                told.append(str(error.value))
        return told


def test_unknown_tokens_are_refused(workers):
    assert all("out of" in text for text in sum(workers.run(unknown_tokens, 2), []))


def gathered_head(rank: int, world_size: int, store: str) -> str:
    with gloo_world(rank, world_size, store):
        member = Member(Topology.start((2,), 2), rank)
        plan = ParallelPlan({"0": "colwise(gather_output=True)"})
        head = parallelize(nn.Sequential(nn.Linear(4, 9)), plan, member.context).module[0]
        logits = head(torch.randn(3, 4))
        F.cross_entropy(logits, torch.arange(3)).backward()
        with pytest.raises(PlanError) as error:
            vocab_parallel_cross_entropy(logits, torch.arange(3), head)
        return str(error.value)


def test_cross_entropy_of_gathered_logits_is_refused(workers):
    assert "give it the style 'vocab'" in workers.run(gathered_head, 2)[0]
