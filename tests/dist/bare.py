"""Training of one parity case without a Trainer: what a rank does, and how the test puts the parts together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ntp.comm.exchange import Record
from lightning_ntp.data.cut import CutRule, Extent, cut_window
from lightning_ntp.engine import Member
from lightning_ntp.layout import ParameterLayout, Replicated
from lightning_ntp.parallel import ParallelPlan
from lightning_ntp.parallel.shards import put_local
from lightning_ntp.topology import Topology
from tests.support.batches import batch, padded_batch
from tests.support.cases import Case
from tests.support.gloo import gloo_world
from tests.support.models import ModelConfig, build, loss_fn, padded_loss_fn
from tests.support.reference import History, make_optimizer

Steps = list[list[int]]


@dataclass
class RankRun:
    """What a rank reports: per step (from ``first`` on) its part of the loss, the voted norm, its local parameters."""

    replica: int
    slot: int
    losses: list[float]
    norms: list[float]
    weights: list[dict[str, Tensor]]
    layouts: dict[str, ParameterLayout]
    shapes: dict[str, torch.Size]
    records: list[Record]
    degree: int = 0
    first: int = 0

    @classmethod
    def of(cls, member: Member) -> RankRun:
        """An empty run at the member's present place."""
        params = list(member.model.parameters())
        layouts, shapes = {p.name: p.layout for p in params}, {p.name: p.dense_shape for p in params}
        return cls(member.replica, member.slot, [], [], [], layouts, shapes, member.recorder.records, member.context.degree)


def plan_for(config: ModelConfig) -> ParallelPlan:
    """The plan of the test transformer, sharded wherever it can be."""
    heads = f"num_heads={config.num_heads}, num_kv_heads={config.num_kv_heads}"
    return ParallelPlan(
        {
            "embed": "vocab",
            "layers.*.attn": f"attention({heads})",
            "layers.*.mlp": "ffn",
            "lm_head": "colwise(gather_output=True)",
        }
    )


def train_rank(
    rank: int, world_size: int, store: str, case: Case, batches: Steps, record: bool = False, device: str = "cpu"
) -> RankRun:
    """One member of a run over ``batches``, each cut by the case's shares and accumulation."""
    with gloo_world(rank, world_size, store):
        topology = Topology.start(case.degrees, case.nominal)
        member = Member(topology, rank, device=device)
        # Only the leader's seed counts: the others must take over its weights.
        model = build(case.model, seed=0 if rank == topology.leader else 1 + rank).to(device)
        member.shard(model, plan_for(case.model))
        member.start_sync(bucket_cap_mb=0.02)
        optimizer = make_optimizer(case.optimizer, model.parameters())
        run = RankRun.of(member)
        for ids in batches:
            train_step(member, optimizer, case, ids, run, record)
        member.close()
        return run


def train_step(
    member: Member, optimizer: torch.optim.Optimizer, case: Case, ids: list[int], run: RankRun, record: bool = False
) -> None:
    """One optimizer step over the samples ``ids``, added to ``run``."""
    parameters = list(member.model.module.parameters())
    optimizer.zero_grad()
    member.recorder.enabled = record
    run.losses.append(window(member, member.model.module, case, ids, case.shares)[0])
    vote = member.vote(parameters)
    member.recorder.enabled = False
    run.norms.append(vote.grad_norm)
    member.clip(parameters, vote, 1.0)
    optimizer.step()
    run.weights.append({p.name: p.parameter.detach().cpu().clone() for p in member.model.parameters()})


def window(
    member: Member, model: torch.nn.Module, case: Case, ids: list[int], shares: tuple[int, ...]
) -> tuple[float, list[int]]:
    """Forward and backward of one global batch; returns this replica's weighted part of the loss sum, and its samples."""
    cut = cut_window(CutRule(shares, case.accumulate), Extent(len(ids)), start=0, index=0)
    part, taken, tokens_seen = 0.0, [], torch.zeros((), dtype=torch.float64)
    for index in range(cut.count):
        mine = [ids[position] for position in cut.span(member.replica, index)]
        taken += mine
        is_last = index == cut.count - 1
        held = mine or ids[:1]  # a replica without a sample runs one dummy
        if case.padded:
            tokens, labels = (part.to(member.device) for part in padded_batch(held, case.model.vocab))
            loss, count = padded_loss_fn(model(tokens), labels)
            weight = float(count) if mine else 0.0
            tokens_seen += weight
            total = tokens_seen.clone() if is_last else None
            member.sync.begin(weight, sync=is_last, total=total)
        else:
            tokens = batch(held, case.model.vocab).to(member.device)
            loss = loss_fn(model(tokens), tokens)
            weight = len(mine) / len(ids)
            member.sync.begin(weight, sync=is_last)
        part += weight * loss.item()
        loss.backward()
    return part if not case.padded else part / _all_tokens(ids, case), taken


def _all_tokens(ids: list[int], case: Case) -> int:
    _, labels = padded_batch(ids, case.model.vocab)
    return int((labels[:, 1:] != -100).sum())


def history_of(runs: list[RankRun], replica: int) -> History:
    """The run as the dense reference reports it, with the weights of one replica put together."""
    firsts = [run for run in runs if run.slot == 0]
    history = History()
    for step in range(len(runs[0].norms)):
        loss = sum(run.losses[step] for run in firsts)
        history.append(loss, runs[0].norms[step], dense_weights(runs, replica, step))
    return history


def dense_weights(runs: list[RankRun], replica: int, step: int) -> dict[str, Tensor]:
    slots = sorted((run for run in runs if run.replica == replica), key=lambda run: run.slot)
    weights = {}
    for name, layout in slots[0].layouts.items():
        if isinstance(layout, Replicated):
            weights[name] = slots[0].weights[step][name]
            continue
        local = slots[0].weights[step][name]
        dense = torch.full(slots[0].shapes[name], torch.nan, dtype=local.dtype)
        for run in slots:
            put_local(dense, run.weights[step][name], layout, len(slots), run.slot)
        weights[name] = dense
    return weights


def assert_copies_equal(runs: list[RankRun]) -> None:
    """A3: bitwise equal after every step: replicated parameters inside a replica, every unit wherever it is held."""
    replicas = sorted({run.replica for run in runs})
    for step in range(len(runs[0].norms)):
        assert len({run.norms[step] for run in runs}) == 1, f"step {step}: the voted norm differs between members"
        first = dense_weights(runs, 0, step)
        for replica in replicas[1:]:
            for name, dense in dense_weights(runs, replica, step).items():
                assert torch.equal(dense, first[name]), f"step {step}: {name} differs in replica {replica}"
        for run in runs:
            for name, layout in run.layouts.items():
                local, degree = run.weights[step][name], sum(other.replica == run.replica for other in runs)
                if isinstance(layout, Replicated):
                    assert torch.equal(local, first[name]), f"step {step}: {name} differs at r{run.replica}.s{run.slot}"
                else:
                    again = first[name].clone()
                    put_local(again, local, layout, degree, run.slot)
                    assert torch.equal(again, first[name]), f"step {step}: {name} differs at r{run.replica}.s{run.slot}"
