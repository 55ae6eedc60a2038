"""Members that join get everything from the others, members that leave hand over, and nothing is lost on the way."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from lightning_ntp.comm.exchange import Exchange
from lightning_ntp.comm.groups import open_channels, world_handle
from lightning_ntp.engine import Member
from lightning_ntp.reshard import PeerState, ShardKeeper
from lightning_ntp.topology import Topology
from tests.dist.bare import RankRun, assert_copies_equal, history_of, plan_for, train_step
from tests.dist.moves import Outcome, Scenario, Stage, all_seats, assert_true, live, view_of
from tests.dist.test_reshard import STEPS, place, seats, world
from tests.support.cases import Case
from tests.support.gloo import connect
from tests.support.models import ModelConfig, build
from tests.support.reference import assert_parity, make_optimizer, train_dense


def run(workers, scenario: Scenario) -> dict[str, Outcome]:
    """Outcomes by seat, of a scenario whose end is true to the dense run."""
    outcomes = workers.run(live, len(all_seats(scenario)), scenario)
    assert_true(scenario, outcomes)
    return {outcome.seat: outcome for outcome in outcomes}


def sent(outcomes: dict[str, Outcome], seats: str) -> list[int]:
    return [outcomes[seat].reports[0].sent_bytes for seat in seats.split()]


def received(outcomes: dict[str, Outcome], seats: str) -> list[int]:
    return [outcomes[seat].reports[0].received_bytes for seat in seats.split()]


OPTIMIZERS = ["adamw", "adamw-loop", "adamw-fused", "adamw-tensor-lr", "sgd", "adagrad", "nadam"]


@pytest.mark.parametrize(
    ("optimizer", "stale"), [*((name, False) for name in OPTIMIZERS), ("adamw", True), ("sgd", True)]
)
def test_a_joiner_gets_everything_from_its_own_replica(workers, optimizer, stale):
    scenario = Scenario("00 01 02, 10 11", (Stage("00 01 02 03, 10 11"),), optimizer=optimizer, stale_joiners=stale)
    outcomes = run(workers, scenario)
    assert sum(sent(outcomes, "00 01 02")) == received(outcomes, "03")[0] > 0
    assert outcomes["10"].stayed and outcomes["11"].stayed and not any(sent(outcomes, "10 11"))
    assert outcomes["03"].is_same_group, "schedulers refer to the groups"


JOINS = [
    pytest.param(Scenario("10 11 12 13", (Stage("00 01 02 03, 10 11 12 13"),)), id="replica-returns-to-one"),
    pytest.param(Scenario("10 11", (Stage("00 01 02, 10 11"),), optimizer="sgd"), id="replica-returns-to-reduced-one"),
    pytest.param(Scenario("00 01 02, 10 11", (Stage("00 02 03, 10 11"),)), id="joins-as-another-dies"),
    pytest.param(Scenario("00 01", (Stage("00 01 02 03 04 05 06 07"),), nominal=8), id="slots-without-heads"),
    pytest.param(Scenario("00 01 02, 10 11", (Stage("00 01 02 03, 10 11 12"),)), id="one-joins-each-replica"),
    pytest.param(
        Scenario("00 01, 10 11", (Stage("00, 10 11"), Stage("00 02, 10 11", commits=True), Stage("00 02, 10"))),
        id="dies-returns-another-dies",
    ),
]  # fmt: skip


@pytest.mark.parametrize("scenario", JOINS)
def test_weights_and_states_are_those_of_the_dense_run(workers, scenario):
    run(workers, scenario)


def test_a_whole_replica_returns_from_all_others_alike(workers):
    model = ModelConfig(width=24, num_heads=6, num_kv_heads=3, layers=2)
    after = "00 01 02, 10 11 12, 20 21 22"
    outcomes = run(workers, Scenario("00 01 02, 20 21 22", (Stage(after),), model=model, nominal=3))
    givers, takers = sent(outcomes, "00 01 02 20 21 22"), received(outcomes, "10 11 12")
    assert sum(givers) == sum(takers)
    assert takers == [outcomes[seat].nbytes for seat in ("10", "11", "12")], "each gets its own tensors once"
    assert max(givers) <= 1.1 * min(givers), givers


class TestDrain:
    def test_a_single_replica_loses_nothing_and_moves_the_least(self, workers):
        model = ModelConfig(width=24, num_heads=6, num_kv_heads=6, layers=1)
        outcomes = run(workers, Scenario("00 01 02", (Stage("00 01", drained="02"),), model=model))
        assert not any(sent(outcomes, "00 01")) and not received(outcomes, "02")[0]
        assert sent(outcomes, "02") == [sum(received(outcomes, "00 01"))]
        assert sent(outcomes, "02")[0] == outcomes["02"].sharded_nbytes, "every unit has one holder"

    def test_of_the_first_slot(self, workers):
        run(workers, Scenario("00 01 02", (Stage("02 01", drained="00"),), optimizer="adamw-loop"))

    def test_and_a_joiner_in_one_move(self, workers):
        run(workers, Scenario("00 01 02", (Stage("00 02 03", drained="01"),)))

    def test_of_all_that_were_there(self, workers):
        run(workers, Scenario("00 01 02, 10 11", (Stage("20 21", drained="00 01 02 10 11"),)))


class TestWhatIsGivenUp:
    def test_is_kept_by_a_single_replica_until_the_commit(self, workers):
        outcomes = run(workers, Scenario("00 01 02", (Stage("00 01 02 03"), Stage("00 01 02 03", commits=True))))
        before, after = (outcomes[seat].held for seat in ("00", "03"))
        assert max(before[0]) == 2 and min(before[0]) == 1, "replicated parameters have nothing to keep"
        assert max(after[0]) == 1
        assert max(outcomes["00"].held_at_end) == 1

    def test_is_not_kept_where_another_replica_has_it(self, workers):
        outcomes = run(workers, Scenario("00 01 02, 10 11", (Stage("00 01 02 03, 10 11"),)))
        assert {count for outcome in outcomes.values() for count in outcome.held[0]} == {1}

    def test_comes_back_when_the_joiner_dies_before_the_commit(self, workers):
        outcomes = run(workers, Scenario("00 01 02", (Stage("00 01 02 03"), Stage("00 01 02"))))
        assert not any(outcomes[seat].reports[1].received_bytes for seat in ("00", "01", "02"))

    def test_is_not_needed_when_a_joiner_dies_and_another_replica_lives(self, workers):
        run(workers, Scenario("00 01 02, 10 11", (Stage("00 01 02 03, 10 11"), Stage("00 01 02, 10 11"))))


DEATHS = {
    "survivor-of-the-other-replica": ("00 01 02, 10 11 12", "02 01, 10 11 12", "12", "02 01, 10 11"),
    "survivor-of-the-hit-replica": ("00 01 02, 10 11 12", "02 01, 10 11 12", "01", "02, 10 11 12"),
    "joiner": ("00 01 02, 10 11 12", "00 01 02 03, 10 11 12", "03", "00 01 02, 10 11 12"),
    "joiner-of-a-single-replica": ("00 01 02", "00 01 02 03", "03", "00 01 02"),
    "veteran-as-one-joins": ("00 01 02, 10 11 12", "00 01 02 03, 10 11 12", "11", "00 01 02 03, 10 12"),
    "member-of-a-returning-replica": ("00 01 02", "00 01 02, 10 11 12", "11", "00 01 02, 10 12"),
}


@pytest.mark.parametrize("at", [1, 4, *(pytest.param(at, marks=pytest.mark.slow) for at in (2, 7))])
@pytest.mark.parametrize("death", DEATHS)
def test_a_death_in_the_middle_of_a_move_loses_nothing(workers, death, at):
    before, after, dies, last = DEATHS[death]
    stages = (Stage(after, dies=dies, at=at), Stage(last))
    outcomes = run(workers, Scenario(before, stages))
    assert outcomes[dies].error == "dead"
    assert not any(outcomes[seat].error for seat in view_of(last))


@pytest.mark.parametrize("at", [3, 5, 7])
def test_givers_keep_what_a_joiner_has_not_got_yet(workers, at):
    """The only other holder dies when some members are through with a chunk and the joiner is not."""
    view = "00 01 02 03, 10 11 12"
    stages = (Stage(view, dies="10", at=at, misses="03"), Stage("00 01 02 03, 12 11"))
    outcomes = run(workers, Scenario("00 01 02, 10 11 12", stages))
    assert outcomes["10"].error == "dead" and len(outcomes["03"].reports) == 1, "the joiner left the first move"


def train_and_join(rank: int, world_size: int, store: str, case: Case, after: str) -> RankRun:
    """Train at the case's degrees, then with the members that join; a joiner sets everything up alone before."""
    old, new, client = Topology.start(case.degrees, case.nominal), Topology(case.nominal, seats(after)), connect(store)
    me = new.members[rank]
    is_new = me not in old.members
    first = Topology(case.nominal, ((me,),)) if is_new else old
    world(client, f"alone{rank}" if is_new else "old", first.members.index(me), first.world_size)
    member = Member(first, first.members.index(me))
    member.shard(build(case.model, seed=rank), plan_for(case.model))
    member.start_sync(bucket_cap_mb=0.02)
    optimizer = make_optimizer(case.optimizer, member.model.module.parameters(), lr=0.3 if is_new else 1e-3)
    batches = case.global_batches(2 * STEPS)
    for ids in [] if is_new else batches[:STEPS]:
        train_step(member, optimizer, case, ids, RankRun.of(member))
    keeper = ShardKeeper(member.model, [optimizer], None if is_new else place(old, me))
    dist.destroy_process_group()
    world(client, "new", rank, world_size)
    told: list = [None] * world_size
    dist.all_gather_object(told, json.dumps(keeper.schema()))
    if is_new:
        keeper.adopt(json.loads(told[0]))
    count = len(list(member.model.parameters()))
    held = [((place(old, s),),) * count if s in old.members else () for s in new.members]
    peers = [PeerState(h, place(new, s)) for h, s in zip(held, new.members, strict=True)]
    keeper.move(Exchange(world_handle(world_size, rank)), peers)
    member.enter_view(new, rank, open_channels(new, rank))
    run = RankRun.of(member)
    for ids in batches[STEPS:]:
        train_step(member, optimizer, case, ids, run)
    member.close()
    dist.destroy_process_group()
    return run


def test_training_goes_on_as_the_dense_run_when_members_join(workers):
    case = Case("join", (4, 2), ModelConfig(width=24, num_heads=6, num_kv_heads=3, bias=True), accumulate=2)
    runs = workers.run(train_and_join, 8, case, "00 01 02 03, 10 11 12 13")
    dense = train_dense(case.model, case.global_batches(2 * STEPS), optimizer=case.optimizer)
    for history in (dense.losses, dense.norms, dense.weights):
        del history[:STEPS]
    for replica in range(2):
        assert_parity(history_of(runs, replica), dense)
    assert_copies_equal(runs)
