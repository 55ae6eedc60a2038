"""Shards and optimizer states between views: what moves, what stays, and parity afterwards. Nobody is killed here."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from lightning_ntp.comm.exchange import Exchange
from lightning_ntp.comm.groups import open_channels, world_handle
from lightning_ntp.engine import Member
from lightning_ntp.errors import ShardsLost
from lightning_ntp.layout import GroupedFamily, Sharded
from lightning_ntp.parallel.shards import take_local
from lightning_ntp.reshard import MoveReport, PeerState, Place, ShardKeeper
from lightning_ntp.topology import Seat, Topology
from tests.dist.bare import RankRun, assert_copies_equal, history_of, plan_for, train_step
from tests.dist.moves import Scenario, Stage, live, view_of
from tests.support.cases import Case
from tests.support.gloo import connect
from tests.support.models import ModelConfig, build
from tests.support.reference import assert_parity, make_optimizer, train_dense

GQA = ModelConfig(num_kv_heads=2, fused_qkv=True, fused_gate_up=True, tied=True, bias=True)
RAGGED = ModelConfig(width=24, num_heads=6, num_kv_heads=3, norm="layer")
SEVEN = ModelConfig(width=28, num_heads=7, num_kv_heads=7, unused=True)
STEPS = 3


@dataclass
class Outcome:
    """What a rank saw: its run after the change, what the move cost it, whether its tensors stayed where they were."""

    run: RankRun | None
    report: MoveReport | None
    stayed: bool = False
    error: str = ""


def seats(text: str) -> tuple[tuple[Seat, ...], ...]:
    """``"00 02, 10 11"``: replica and seat numbers, in slot order, replicas by comma."""
    return tuple(tuple(Seat(int(s[0]), int(s[1:])) for s in part.split()) for part in text.split(","))


def place(topology: Topology, seat: Seat) -> Place:
    replica, slot = topology.place(topology.members.index(seat))
    return Place(seat.replica, topology.degrees[replica], slot)


def world(client, name: str, rank: int, size: int) -> None:
    dist.init_process_group("gloo", store=dist.PrefixStore(name, client), rank=rank, world_size=size)


def change(rank: int, world_size: int, store: str, case: Case, after: str, drained: bool) -> Outcome:
    """Train at the case's degrees, then at the seats ``after``; who is not among them hands over if ``drained``."""
    old, client = Topology.start(case.degrees, case.nominal), connect(store)
    new, me = Topology(case.nominal, seats(after)), old.members[rank]
    world(client, "old", rank, world_size)
    member = Member(old, rank)
    member.shard(build(case.model, seed=rank), plan_for(case.model))
    member.start_sync(bucket_cap_mb=0.02)
    optimizer = make_optimizer(case.optimizer, member.model.module.parameters())
    batches = case.global_batches(2 * STEPS)
    for ids in batches[:STEPS]:
        train_step(member, optimizer, case, ids, RankRun.of(member))
    keeper = ShardKeeper(member.model, [optimizer], place(old, me))
    pointers = [parameter.data_ptr() for parameter in member.model.module.parameters()]
    count = len(list(member.model.parameters()))

    def peers(members: tuple[Seat, ...]) -> list[PeerState]:
        return [PeerState(((place(old, s),),) * count, place(new, s) if s in new.members else None) for s in members]

    report = None
    if drained:
        report = keeper.move(Exchange(world_handle(world_size, rank)), peers(old.members))
    dist.destroy_process_group()
    if me not in new.members:
        return Outcome(None, report)
    rank = new.members.index(me)
    world(client, "new", rank, new.world_size)
    if not drained:
        try:
            report = keeper.move(Exchange(world_handle(new.world_size, rank)), peers(new.members))
        except ShardsLost as error:
            return Outcome(None, None, error=str(error))
    stayed = pointers == [parameter.data_ptr() for parameter in member.model.module.parameters()]
    member.enter_view(new, rank, open_channels(new, rank))
    run = RankRun.of(member)
    for ids in batches[STEPS:]:
        train_step(member, optimizer, case, ids, run)
        keeper.forget_kept()
    member.close()
    return Outcome(run, report, stayed)


CHANGES = [
    pytest.param(Case("last", (4, 3), GQA), "00 01 02, 10 11 12", False, id="last-seat-dies"),
    pytest.param(Case("middle", (4, 4), RAGGED, accumulate=2), "00 03 02, 10 11 12 13", False, id="middle-seat-dies"),
    pytest.param(Case("two", (4, 4), SEVEN), "02 03, 10 11 12 13", False, id="two-die"),
    pytest.param(Case("both", (3, 3), GQA, optimizer="sgd"), "00 02, 10 11", False, id="one-of-each-dies"),
    pytest.param(Case("drain", (3,), RAGGED), "00 02", True, id="drain-of-a-single-replica"),
    pytest.param(Case("drain", (4, 3), SEVEN), "03 01 02, 10 11 12", True, id="drain-of-rank-0"),
]


@pytest.mark.parametrize(("case", "after", "drained"), CHANGES)
def test_parity_after_a_change_of_view(workers, case, after, drained):
    outcomes = workers.run(change, case.num_ranks, case, after, drained)
    runs = [outcome.run for outcome in outcomes if outcome.run is not None]
    assert len(runs) == sum(map(len, seats(after)))
    batches = case.global_batches(2 * STEPS)
    dense = train_dense(case.model, batches, optimizer=case.optimizer)
    for history in (dense.losses, dense.norms, dense.weights):
        del history[:STEPS]
    for replica in range(len(case.degrees)):
        assert_parity(history_of(runs, replica), dense)
    assert_copies_equal(runs)
    healthy = [r for r, replica in enumerate(seats(after)) if len(replica) == case.degrees[r]]
    for outcome in outcomes:
        if outcome.run is not None and outcome.run.replica in healthy:
            assert outcome.stayed and not outcome.report.received_bytes, "no healthy replica's weights move"


def test_bytes_are_those_of_the_lost_shard(workers):
    """B5, for one lost seat: what travels is the lost shard, and for a mover the difference between its slots."""
    case = Case("bytes", (4, 4), ModelConfig(width=32, num_heads=8, num_kv_heads=8))
    outcomes = workers.run(change, 8, case, "00 01 02, 10 11 12 13", False)
    received = sum(outcome.report.received_bytes for outcome in outcomes if outcome.report)
    assert received == sum(outcome.report.sent_bytes for outcome in outcomes if outcome.report)
    run = outcomes[-1].run
    assert run is not None
    lost = sum(  # r1.s3 holds what r0.s3 held: weight, exp_avg and exp_avg_sq
        3 * tensor.nbytes for name, tensor in run.weights[0].items() if isinstance(run.layouts[name], Sharded)
    )
    assert received == lost


def rows_received(layout: Sharded, old: Place, new: Place) -> int:
    """Rows that a member's part at ``new`` has and that at ``old`` has not, counted one by one."""
    numbers = torch.arange(layout.extent).unflatten(0, (-1, 1) if layout.dim == 0 else (1, -1))
    had, has = (set(take_local(numbers, layout, p.degree, p.slot).flatten().tolist()) for p in (old, new))
    return len(has - had)


@pytest.mark.parametrize("dead", ["00", "01", "02"])
def test_bytes_at_a_failure_are_the_plans_and_within_the_bound(workers, dead):
    """B5 with Adam: at most twice the lost shard and the listed KV copies, counted from the shapes."""
    model = ModelConfig(width=24, num_heads=6, num_kv_heads=3, layers=1)
    before = "00 01 02, 10 11 12"
    after = {"00": "02 01", "01": "00 02", "02": "00 01"}[dead] + ", 10 11 12"
    scenario = Scenario(before, (Stage(after),), model=model, nominal=3)
    outcomes = {outcome.seat: outcome for outcome in workers.run(live, 6, scenario)}
    reports = {seat: outcome.reports[0] for seat, outcome in outcomes.items() if outcome.reports}
    expected = dict.fromkeys(view_of(after), 0)
    for seat in expected:
        for name, layout in outcomes[seat].layouts.items():
            if isinstance(layout, Sharded):
                rows = rows_received(layout, view_of(before)[seat], view_of(after)[seat])
                across = outcomes[seat].tensors[name][""].movedim(layout.dim, 0)[0].numel()
                expected[seat] += rows * across * 3 * 8  # weight, exp_avg, exp_avg_sq
    assert {seat: report.received_bytes for seat, report in reports.items()} == expected
    assert sum(report.sent_bytes for report in reports.values()) == sum(expected.values())
    assert all(outcomes[seat].stayed and not expected[seat] for seat in ("10", "11", "12"))
    family = GroupedFamily(6, 3, 3)
    copies = sum(family.at(2).loads) - sum(family.at(3).loads)
    kv_head = 2 * 4 * 24 * 3 * 8  # k and v: head_dim rows of the width
    assert outcomes[dead].sharded_nbytes <= sum(expected.values())
    assert sum(expected.values()) <= 2 * outcomes[dead].sharded_nbytes + copies * kv_head


def test_lost_shards_are_told_alike_by_all(workers):
    case = Case("lost", (2, 2), ModelConfig())
    outcomes = workers.run(change, 4, case, "00, 10", False)
    errors = {outcome.error for outcome in outcomes if outcome.run is None and outcome.report is None}
    told = errors - {""}
    assert len(told) == 1 and "no live member holds all of embed.weight" in told.pop()
