"""Silent corruption: a bit that flips in one member's weights is seen by all, and the member is named."""

from __future__ import annotations

import functools
import os
import pickle
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from lightning_ntp.engine import Member
from lightning_ntp.engine.events import CorruptionEvent, Observer
from lightning_ntp.engine.plain import Plain
from lightning_ntp.engine.survivor import Survivor
from lightning_ntp.errors import Drained
from lightning_ntp.membership.exits import ExitCode
from lightning_ntp.membership.member import Membership
from lightning_ntp.membership.store import JobStore
from lightning_ntp.membership.view import View
from lightning_ntp.policy import deal
from lightning_ntp.reshard import ShardKeeper
from lightning_ntp.reshard.rows import row_numel
from lightning_ntp.topology import Seat, Topology
from tests.dist import survive
from tests.dist.bare import plan_for, window
from tests.dist.bare_member import connect
from tests.dist.survive import Fault, FaultyProgress
from tests.support.cases import Case
from tests.support.gloo import gloo_world
from tests.support.models import ModelConfig, build
from tests.support.reference import make_optimizer

GQA = ModelConfig(width=24, num_heads=6, num_kv_heads=3, bias=True, layers=1)
THREE = Case("verify", (2, 2, 1), GQA, shares=(2, 2, 2), accumulate=1)
EVEN = Case("verify", (2, 2, 2), GQA, shares=(2, 2, 2), accumulate=1)
TWO = Case("verify", (2, 2), GQA, shares=(3, 3), accumulate=1)
STEPS = 20


@dataclass(frozen=True)
class Flip:
    """Before ``step``, a bit of a parameter's last element changes at ``seat``: not so low that it is rounded away."""

    seat: str
    step: int
    parameter: str

    def strike(self, member: Member) -> None:
        param = next(each for each in member.model.parameters() if each.name == self.parameter)
        param.parameter.data.view(torch.int64).flatten()[-1] ^= 1 << 40


@dataclass(frozen=True)
class Plan:
    """What is verified, and what goes wrong.

    Attributes:
        every: ``verify_every_n_steps``.
        flips: Bits that change.
        spoils: (seat, number of a tensor): in the first move, the first rows of the parameter (0) or of its state (1,
            ...) that arrive at the seat are wrong in one bit.
    """

    every: int
    flips: tuple[Flip, ...] = ()
    spoils: tuple[str, int] | None = None


@dataclass
class Log(Observer):
    """What one member reports at its end."""

    events: list[CorruptionEvent] = field(default_factory=list)
    degrees: tuple[int, ...] = ()
    steps: int = 0

    def on_corruption(self, event: CorruptionEvent) -> None:
        self.events.append(event)


def verified_member(
    plan: Plan, port: int, seat: Seat, founding: View, case: Case, steps: int, faults: list[Fault], out: Path
) -> int:
    os.setsid()
    store = connect(port)
    progress = FaultyProgress([fault for fault in faults if fault.seat == str(seat)])
    jobs = JobStore(lambda: connect(port), survive.TOKEN)
    membership = Membership(jobs, seat, founding, timeouts=survive.TIMEOUTS, progress=progress)
    survivor, log, code = Survivor(membership, store, founding=founding.topology), Log(), 0
    survivor.verify_every_n_steps = plan.every
    survivor.observers.append(log)
    if plan.spoils is not None and plan.spoils[0] == str(seat):
        _spoil_the_first_arrival(plan.spoils[1])
    try:
        _train(survivor, plan, case, steps, log)
    except Drained:
        code = int(ExitCode.DRAINED)
    log.degrees = survivor.topology.degrees
    out.write_bytes(pickle.dumps(log))
    return code


def _spoil_the_first_arrival(number: int) -> None:
    paste = ShardKeeper._paste

    def spoiled(self, index, fresh, leg, data):
        tensor = next(iter(fresh.values()))
        at = number * leg.rows * row_numel(self._params[index]) * tensor.element_size()
        data = data.clone()
        data[at] ^= 1
        ShardKeeper._paste = paste
        return paste(self, index, fresh, leg, data)

    ShardKeeper._paste = spoiled


def _train(survivor: Survivor, plan: Plan, case: Case, steps: int, log: Log) -> None:
    model = build(case.model)
    survivor.join()
    member = survivor.new_member()
    member.cut(model, plan_for(case.model))
    member.start_sync(bucket_cap_mb=0.02)
    optimizer = make_optimizer(case.optimizer, model.parameters())
    survivor.own([optimizer])
    for step, ids in enumerate(case.global_batches(steps)):
        for flip in plan.flips:
            if (flip.seat, flip.step) == (str(survivor.membership.seat), step):
                flip.strike(member)

        def run(shares: tuple[int, ...], ids: list[int] = ids) -> None:
            optimizer.zero_grad()
            survivor.begin_phase("backward")
            window(member, model, case, ids, shares)
            survivor.commit(optimizer, 1.0)

        survivor.run_step(run, lambda view: deal(case.global_batch_size, view.topology.degrees))
        log.steps += 1
    survivor.finish()


def launch(rank: int, world_size: int, store: str, case: Case, plan: Plan, faults: list[Fault]):
    return survive.launch(rank, world_size, store, case, STEPS, faults, functools.partial(verified_member, plan))


def run(workers, case: Case, plan: Plan, *faults: Fault) -> tuple[dict[str, int], dict[str, Log]]:
    (result,) = workers.run(launch, 1, case, plan, list(faults), timeout_s=90)
    return result


def facts(event: CorruptionEvent) -> tuple:
    return event.parameters, tuple(map(str, event.seats)), event.is_certain, event.after_change


@pytest.mark.parametrize(
    ("every", "flip"),
    [
        (1, Flip("r1.s1", 2, "layers.0.attn.o_proj.weight")),
        (1, Flip("r0.s0", 4, "layers.0.attn.k_proj.weight")),
        (2, Flip("r2.s0", 1, "embed.weight")),
        (1, Flip("r1.s1", 2, "norm.weight")),
    ],
    ids=lambda value: str(getattr(value, "parameter", value)),
)  # fmt: skip
def test_of_three_replicas_the_deviating_member_is_named_and_leaves(workers, every, flip):
    codes, logs = run(workers, THREE, Plan(every, (flip,)))
    assert codes.pop(flip.seat) == ExitCode.DRAINED and not any(codes.values()), codes
    told = {facts(event) for log in logs.values() for event in log.events}
    assert told == {((flip.parameter,), (flip.seat,), True, False)}
    firsts = {log.events[0].step for log in logs.values()}
    assert len(firsts) == 1, "all members see it in the same vote"
    seen = firsts.pop()
    assert seen % every == 0 and flip.step <= seen < flip.step + 8 * every
    assert logs[flip.seat].steps == seen + 2, "it asks in the next vote, and leaves before the step after that"
    expected = [2, 2, 1]
    expected[int(flip.seat[1])] -= 1
    for seat in codes:
        assert logs[seat].steps == STEPS and logs[seat].degrees == tuple(degree for degree in expected if degree)


def test_of_two_replicas_both_are_suspected(workers):
    flip = Flip("r0.s1", 2, "layers.0.mlp.down_proj.weight")
    codes, logs = run(workers, TWO, Plan(1, (flip,)))
    assert not any(codes.values()), codes
    told = {facts(event) for log in logs.values() for event in log.events}
    assert told == {((flip.parameter,), ("r0.s1", "r1.s1"), False, False)}
    assert all(log.events and log.degrees == (2, 2) for log in logs.values())


def test_a_move_is_proved(workers):
    """Verified are the first votes in each view only: all is as it should be."""
    codes, logs = run(workers, THREE, Plan(1000), Fault("r1.s1", 3, "backward"))
    assert {seat for seat, code in codes.items() if code} == {"r1.s1"}
    assert all(not log.events and log.steps == STEPS and log.degrees == (2, 1, 1) for log in logs.values())


@pytest.mark.parametrize("number", [0, 1], ids=["weights", "state"])
def test_a_wrong_move_is_seen_in_the_first_vote_after_it(workers, number):
    codes, logs = run(workers, EVEN, Plan(1000, spoils=("r1.s0", number)), Fault("r1.s1", 3, "backward"))
    assert codes.pop("r1.s1") < 0 and codes.pop("r1.s0") == ExitCode.DRAINED and not any(codes.values()), codes
    for log in logs.values():
        (event,) = log.events
        assert facts(event)[1:] == (("r1.s0",), True, True) and len(event.parameters) == 1 and event.step == 3
    assert all(logs[seat].degrees == (2, 2) for seat in codes)


def test_a_death_while_the_member_is_looked_for(workers):
    """The vote on the step is settled without it; the first vote in the new view finds the member."""
    flip = Flip("r1.s1", 2, "embed.weight")
    codes, logs = run(workers, EVEN, Plan(1, (flip,)), *(Fault("r0.s1", step, "control") for step in range(2, 10)))
    assert codes.pop("r0.s1") < 0 and codes.pop("r1.s1") == ExitCode.DRAINED and not any(codes.values()), codes
    told = {facts(event) for seat, log in logs.items() for event in log.events if seat != "r0.s1"}
    assert told == {(("embed.weight",), ("r1.s1",), True, True)}


def plain_member(rank: int, world_size: int, store: str, flip: Flip) -> tuple[list[CorruptionEvent], list[Counter]]:
    """Some steps without recovery; returns what was told, and the collectives of each vote."""
    with gloo_world(rank, world_size, store):
        topology = Topology.start((2, 1, 1))
        engine, log, counts = Plain(Member(topology, rank)), Log(), []
        model = build(GQA)
        engine.member.shard(model, plan_for(GQA))
        engine.member.start_sync()
        optimizer = make_optimizer("adamw", model.parameters())
        engine.verify_every_n_steps, engine.observers = 2, [log]
        engine.own([optimizer])
        for step in range(26):
            if (flip.seat, flip.step) == (str(topology.members[rank]), step):
                flip.strike(engine.member)
            optimizer.zero_grad()
            window(engine.member, model, Case("plain", (2, 1, 1), GQA), list(range(3)), (1, 1, 1))
            engine.member.recorder.enabled, engine.member.recorder.records = True, []
            engine.vote(list(model.parameters()))
            counts.append(Counter((each.channel, each.tag) for each in engine.member.recorder.records))
            engine.member.recorder.enabled = False
            optimizer.step()
            engine.applied_step()
        engine.member.close()
        return log.events, counts


def test_without_recovery_it_is_told_and_costs_no_collective(workers):
    flip = Flip("r2.s0", 9, "layers.0.mlp.gate_proj.bias")
    results = workers.run(plain_member, 4, flip)
    for events, counts in results:
        (event,) = events
        assert facts(event) == ((flip.parameter,), ("r2.s0",), True, False) and event.step >= flip.step
        assert all(count == counts[1] for step, count in enumerate(counts) if step != event.step), "as without a check"
        assert any(tag == "units" for _, tag in counts[event.step])
