"""Moves of parameters and optimizer states between views, against the dense truth, without a forward pass.

The gradients are known in advance: each member takes its part of them, so its optimizer's states are parts of a dense
optimizer's, bit by bit. A scenario goes through stages; in each some members join, leave in an orderly way, are dead or
die in the middle of the move.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ntp.comm.abort import poison
from lightning_ntp.comm.exchange import Exchange
from lightning_ntp.comm.groups import GroupHandle, world_handle
from lightning_ntp.errors import ShardsLost
from lightning_ntp.layout import ParameterLayout, Sharded
from lightning_ntp.parallel import ParallelModel, TensorParallelContext, parallelize
from lightning_ntp.parallel.shards import take_local
from lightning_ntp.reshard import MoveReport, PeerState, Place, ShardKeeper, digest_of, held_from_json, held_to_json
from tests.dist.bare import plan_for
from tests.support.gloo import connect
from tests.support.models import ModelConfig, build

STEPS = 3
# Torch's fused CPU kernel rounds the elements that fill no vector register otherwise: parts equal the whole to an ulp.
INEXACT = ("adamw-fused",)
Tensors = dict[str, dict[str, Any]]  # by parameter: "" is the parameter, then its states


@dataclass(frozen=True)
class Stage:
    """One change of view. Seats are written as ``"00 02, 10 11"``: in slot order, replicas by comma.

    Attributes:
        after: The new view. Who is in it and was not before, joins.
        drained: Who leaves and hands over; all others that are not in ``after`` are dead.
        dies: A seat that dies in this move, ...
        at: ... when it starts its so-and-so-manieth collective of the move; after the move if there are fewer.
        misses: A seat that lives, but leaves at the end of that collective without its result, as ``dies`` does then.
        commits: Whether a step is committed afterwards.
    """

    after: str
    drained: str = ""
    dies: str = ""
    at: int = 1
    misses: str = ""
    commits: bool = False


@dataclass(frozen=True)
class Scenario:
    before: str
    stages: tuple[Stage, ...]
    model: ModelConfig = ModelConfig(width=24, num_heads=6, num_kv_heads=3, bias=True, unused=True, layers=1)
    optimizer: str = "adamw"
    nominal: int = 4
    stale_joiners: bool = False
    chunk_bytes: int = 20_000


@dataclass
class Outcome:
    """What one member has after the last stage that it was in, and after one more step.

    Attributes:
        held: After each stage the number of holdings of every parameter, before anything is forgotten.
        held_at_end: The same at the end.
        stayed: Whether no tensor of the parameters was replaced in any stage.
        is_same_group: Whether the optimizer's parameter groups are still the same objects.
        digests: After each stage, of its schema.
    """

    seat: str
    place: Place | None = None
    tensors: Tensors = field(default_factory=dict)
    after_a_step: Tensors = field(default_factory=dict)
    reports: list[MoveReport] = field(default_factory=list)
    held: list[list[int]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    held_at_end: list[int] = field(default_factory=list)
    stayed: bool = True
    is_same_group: bool = True
    layouts: dict[str, ParameterLayout] = field(default_factory=dict)
    nbytes: int = 0
    sharded_nbytes: int = 0
    error: str = ""

    def weigh(self, tensors: Tensors) -> None:
        """Note the bytes of what this member holds now: all of the parameters' shapes, and the sharded ones."""
        self.nbytes = self.sharded_nbytes = 0
        for name, states in tensors.items():
            nbytes = sum(s.nbytes for s in states.values() if isinstance(s, Tensor) and s.shape == states[""].shape)
            self.nbytes += nbytes
            self.sharded_nbytes += nbytes * isinstance(self.layouts[name], Sharded)


def view_of(text: str) -> dict[str, Place]:
    """Places by seat, in rank order."""
    replicas = [part.split() for part in text.split(",")]
    return {
        seat: Place(int(seat[0]), len(replica), slot) for replica in replicas for slot, seat in enumerate(replica)
    }


def all_seats(scenario: Scenario) -> list[str]:
    """Everybody who is there at some time, in rank order of the test's processes."""
    views = (scenario.before, *(stage.after for stage in scenario.stages))
    return list(dict.fromkeys(seat for text in views for seat in view_of(text)))


def make(name: str, model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    """Matrices and vectors have a parameter group each."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": lr / 2},
    ]
    makers = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=lr),
        "adamw-loop": lambda: torch.optim.AdamW(groups, lr=lr, foreach=False, amsgrad=True),
        "adamw-fused": lambda: torch.optim.AdamW(groups, lr=lr, fused=True),
        "adamw-tensor-lr": lambda: torch.optim.AdamW(
            [{**group, "lr": torch.tensor(lr)} for group in groups], lr=torch.tensor(lr), foreach=False
        ),
        "sgd": lambda: torch.optim.SGD(groups, lr=lr, momentum=0.9),
        "adagrad": lambda: torch.optim.Adagrad(groups, lr=lr),  # has states from the start
        "nadam": lambda: torch.optim.NAdam(groups, lr=lr),  # two scalars
    }
    return makers[name]()


class Trained:
    """A model and its optimizer under known gradients: dense, or a slot's part.

    Attributes:
        place: Where a member is; ``None`` for the dense truth.
    """

    def __init__(self, scenario: Scenario, place: Place | None, seed: int = 0, lr: float = 1e-3) -> None:
        self.place = place
        slot = place or Place(0, 1, 0)
        module = build(scenario.model, seed)
        self._dense = {name: parameter.shape for name, parameter in module.named_parameters()}
        context = TensorParallelContext.at(Exchange(GroupHandle("alone")), slot.degree, slot.slot, scenario.nominal)
        self.model = ParallelModel(module, context) if place is None else parallelize(
            module, plan_for(scenario.model), context
        )
        self.optimizer = make(scenario.optimizer, module, lr)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.7)

    def step(self, number: int) -> None:
        """One step with the gradients of that number; the parameters called unused have none."""
        for at, param in enumerate(self.model.parameters()):
            if param.name.startswith("unused"):
                continue
            generator = torch.Generator().manual_seed(1000 * number + at)
            grad = torch.randn(self._dense[param.name], generator=generator, dtype=torch.float64)
            if self.place is not None:
                grad = take_local(grad, param.layout, self.place.degree, self.place.slot)
            param.parameter.grad = grad
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def tensors(self) -> Tensors:
        """A copy of each parameter and its states."""
        return {
            param.name: {
                key: value.detach().clone() if isinstance(value, Tensor) else value
                for key, value in {"": param.parameter, **self.optimizer.state.get(param.parameter, {})}.items()
            }
            for param in self.model.parameters()
        }


class Failing(Exchange):
    """Raises ``reason`` at the start of a collective, or at its end."""

    def __init__(self, handle: GroupHandle, at: int, reason: str, at_end: bool) -> None:
        super().__init__(handle)
        self._left, self._reason, self._at_end = at, reason, at_end

    def all_to_all(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._count(super().all_to_all, *args, **kwargs)

    def all_reduce(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._count(super().all_reduce, *args, **kwargs)

    def _count(self, collective: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        self._left -= 1
        result = collective(*args, **kwargs) if self._left or self._at_end else None
        if not self._left:
            raise RuntimeError(self._reason)
        return result


def live(rank: int, world_size: int, store: str, scenario: Scenario) -> Outcome:
    """One member's life through all stages."""
    seat = all_seats(scenario)[rank]
    client, place = connect(store), view_of(scenario.before).get(seat)
    me = Trained(scenario, place) if place else _joiner(scenario, rank)
    if place:
        for number in range(STEPS):
            me.step(number)
    keeper = ShardKeeper(me.model, [me.optimizer], place)
    outcome = Outcome(seat, place, layouts={param.name: param.layout for param in me.model.parameters()})
    outcome.weigh(me.tensors())
    groups = [id(group) for group in me.optimizer.param_groups]
    pointers = [parameter.data_ptr() for parameter in me.model.module.parameters()]
    alive = set(view_of(scenario.before))
    for number, stage in enumerate(scenario.stages):
        after = view_of(stage.after)
        group = [*after, *stage.drained.split()]
        joins = seat in after and seat not in alive
        if seat not in group and seat in alive:
            return outcome
        alive = set(after) - {stage.dies}
        if seat not in group:
            continue
        world = dist.PrefixStore(f"stage{number}", client)
        dist.init_process_group("gloo", store=world, rank=group.index(seat), world_size=len(group))
        outcome.error = _error_of(lambda: _go_through(keeper, scenario, stage, group, seat, joins, outcome))  # noqa: B023
        if outcome.error != "dead":
            dist.destroy_process_group()
        if seat == stage.dies:
            outcome.error = "dead"
        if seat not in after or outcome.error == "dead":
            return outcome
        outcome.place = me.place = after[seat]
        if stage.commits:
            keeper.forget_kept()
    outcome.stayed = pointers == [parameter.data_ptr() for parameter in me.model.module.parameters()]
    outcome.is_same_group = groups == [id(group) for group in me.optimizer.param_groups]
    return _finish(me, keeper, outcome)


def _error_of(move: Callable[[], None]) -> str:
    """Why a move failed: this member died, or left it for another's sake."""
    try:
        move()
    except ShardsLost:
        raise
    except RuntimeError as error:
        poison(dist.group.WORLD)
        return "dead" if str(error) == "dead" else "left"
    return ""


def _finish(me: Trained, keeper: ShardKeeper, outcome: Outcome) -> Outcome:
    """Note what is here, and take one more step."""
    outcome.tensors = me.tensors()
    outcome.weigh(outcome.tensors)
    outcome.held_at_end = [len(places) for places in keeper.held()]
    outcome.digests.append(digest_of(keeper.schema()))
    me.scheduler.last_epoch = STEPS  # restored by whoever restores loops and schedulers
    me.step(STEPS)
    outcome.after_a_step = me.tensors()
    return outcome


def _joiner(scenario: Scenario, rank: int) -> Trained:
    """A process that was parallelized alone, with weights of its own; a stale one has taken a step, too."""
    me = Trained(scenario, Place(0, scenario.nominal, rank % scenario.nominal), seed=100 + rank, lr=0.5)
    if scenario.stale_joiners:
        me.step(77)
        me.optimizer.param_groups[0]["weight_decay"] = 0.7
        unused = me.model.module.unused.weight  # has no state at the others
        me.optimizer.state[unused] = {"momentum_buffer": torch.ones_like(unused), "step": torch.tensor(9.0)}
    return me


def _go_through(
    keeper: ShardKeeper, scenario: Scenario, stage: Stage, group: list[str], seat: str, joins: bool, outcome: Outcome
) -> None:
    handle, after = world_handle(len(group), group.index(seat)), view_of(stage.after)
    told: list[Any] = [None] * len(group)
    schema = None if joins else json.dumps(keeper.schema())
    dist.all_gather_object(told, [held_to_json(keeper.held()), schema])
    peers = [PeerState(held_from_json(data[0]), after.get(who)) for who, data in zip(group, told, strict=True)]
    theirs = next(json.loads(text) for _, text in told if text)
    if joins:
        keeper.adopt(theirs)
    keeper.check(theirs)
    exchange = Exchange(handle)
    if seat in (stage.dies, stage.misses):
        exchange = Failing(handle, stage.at, "dead" if seat == stage.dies else "left", bool(stage.misses))
    try:
        report = keeper.move(exchange, peers, scenario.chunk_bytes)
    finally:
        handle.forget()
    outcome.reports.append(report)
    outcome.held.append([len(places) for places in keeper.held()])
    outcome.digests.append(digest_of(keeper.schema()))


def truth(scenario: Scenario) -> tuple[Tensors, Tensors]:
    """The dense run: at the moves, and after one more step."""
    dense = Trained(scenario, None)
    for number in range(STEPS):
        dense.step(number)
    before = dense.tensors()
    dense.step(STEPS)
    return before, dense.tensors()


def assert_true(scenario: Scenario, outcomes: list[Outcome]) -> None:
    """Every member of the last view has its part of the dense weights and states, bitwise, and goes on with it."""
    last = view_of(scenario.stages[-1].after)
    assert {outcome.seat for outcome in outcomes if outcome.tensors} == set(last)
    before, after = truth(scenario)
    members = [outcome for outcome in outcomes if outcome.tensors]
    assert len({outcome.digests[-1] for outcome in members}) == 1
    for outcome in members:
        assert outcome.place == last[outcome.seat]
        for mine, dense in ((outcome.tensors, before), (outcome.after_a_step, after)):
            assert mine.keys() == dense.keys()
            for name, states in dense.items():
                assert mine[name].keys() == states.keys(), (outcome.seat, name)
                for key, value in states.items():
                    if isinstance(value, Tensor) and value.shape == states[""].shape:
                        value = take_local(value, outcome.layouts[name], outcome.place.degree, outcome.place.slot)
                    where, is_exact = (outcome.seat, name, key), scenario.optimizer not in INEXACT
                    assert is_equal(mine[name][key], value, is_exact), where


def is_equal(mine: Any, dense: Any, is_exact: bool) -> bool:
    if not isinstance(dense, Tensor):
        return mine == dense
    if mine.dtype != dense.dtype or mine.shape != dense.shape:
        return False
    return torch.equal(mine, dense) if is_exact else torch.allclose(mine, dense, rtol=1e-13, atol=0)
