"""From one view to the next, in two halves.

*Agree:* out of all collectives, a member tells how far it is and what it holds, and gets the next view.
*Change:* new channels, the shards that this member lacks, and its new slot.

A joiner comes the same way, but alone: until it is admitted, and from then until its first step, its collectives are
the identity, as if it were the only member. With its shards it gets a dowry from the leader: what the others know.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store
from torch.optim import Optimizer

from lightning_ntp.comm.abortable import GenerationWorld
from lightning_ntp.comm.exchange import Exchange
from lightning_ntp.comm.groups import Channels, lone_channels, open_channels, world_handle
from lightning_ntp.comm.objects import broadcast_object
from lightning_ntp.engine.departure import view_without
from lightning_ntp.engine.events import FailureEvent, Observer, ViewEvent
from lightning_ntp.engine.member import Member
from lightning_ntp.engine.record import Record, holdings_of, peer_states, place_of
from lightning_ntp.engine.vote import Vote, Wishes
from lightning_ntp.errors import Drained, Fenced, GenerationOver, MembershipError, UnsupportedError
from lightning_ntp.membership.agreement import Standing
from lightning_ntp.membership.member import Membership
from lightning_ntp.membership.view import View
from lightning_ntp.reshard import MoveReport, PeerState, ShardKeeper
from lightning_ntp.topology import Seat, Topology

log = logging.getLogger(__name__)


class Crossing:
    """One member between the views: its channels, and what moves with it.

    Args:
        membership: Its side of the agreement; not yet started.
        store: A client of the job's store, for the groups' rendezvous; no other thread may block it.
        founding: The topology that the job was founded with.
        device: Where its tensors live.
        backend: Of the groups that carry the model's tensors; with ``"nccl"`` not run.
        lowest_degree: The lowest degree that a replica may reach.
        joins: Whether it joins a job that runs.

    Attributes:
        member: Its part of the model; made by ``new_member``.
        arrived: The last step whose gradients are complete here; -1 before the first.
        applied: The last step that the optimizer has taken; -1 before the first.
        moves: What each change of view cost.
        observers: Hear of failures and changes, in this order.
        is_alone: Whether its collectives are the identity: a joiner before its first step.
        has_left: Whether it has handed over its part.
        splits: How often this replica has halved the passes of a micro-batch, for want of memory.
        gives_up: Whether this member cannot go on at its degree.
        distrusted: Members of this view whose weights deviate from those of most: they hand nothing over.
        make_dowry: What the leader gives to joiners besides shards; anything that can be pickled.
        dowry: What this member was given.
    """

    def __init__(
        self,
        membership: Membership,
        store: Store,
        *,
        founding: Topology,
        device: torch.device | str = "cpu",
        backend: str = "gloo",
        lowest_degree: int = 1,
        joins: bool = False,
    ) -> None:
        self.membership, self._store, self.founding = membership, store, founding
        self._device, self._backend, self._lowest_degree = device, backend, lowest_degree
        self.member: Member | None = None
        self._world: GenerationWorld | None = None
        self._channels: Channels | None = None
        self._keeper: ShardKeeper | None = None
        self._entered: View | None = None  # the view whose channels are open
        self._pending: View | None = None  # the view that is agreed on and not entered yet
        self._left_because, self._left_at = "", 0.0
        self._last_vote: tuple[int, Vote] | None = None
        self._outside = self._evaluated = 0  # how many of each are complete
        self.agreed = Wishes()
        self.arrived = self.applied = -1
        self.moves: list[MoveReport] = []
        self.observers: list[Observer] = []
        self.is_alone, self._lacks_dowry = joins, joins
        self.has_left = self.gives_up = False
        self.distrusted: frozenset[Seat] = frozenset()
        self.splits = self._changed_at = 0
        self.make_dowry: Callable[[], Any] = lambda: None
        self.dowry: Any = None

    @property
    def view(self) -> View:
        """The newest view that this member has agreed on."""
        return self.membership.view

    @property
    def topology(self) -> Topology:
        """Of the view that this member is in; before it is admitted, of the founding."""
        if self._entered is None:
            others = [seat for seat in self.founding.members if seat != self.membership.seat]
            return replace(self.founding, leader_seat=min(others, default=None))
        return self._entered.topology

    @property
    def is_leader(self) -> bool:
        return self.topology.members[self.topology.leader] == self.membership.seat

    # Life

    def join(self) -> None:
        """Join the job's first view and open its channels. A joiner only says that it is there: ``admit`` does it."""
        self.begin_phase("start")
        self.membership.start()
        if self.is_alone:
            self._channels = lone_channels(self.topology, self._rank())
            return
        self._pending = self.membership.agree(self._standing())
        self.enter()

    def new_member(self) -> Member:
        """This process's member for a model that is not sharded yet."""
        assert self._channels is not None, "join() comes first"
        self.member = Member(
            self.topology,
            self._rank(),
            device=self._device,
            backend=self._backend,
            lowest_degree=self._lowest_degree,
            channels=self._channels,
        )
        self._keeper = None
        return self.member

    def own(self, optimizers: Sequence[Optimizer]) -> None:
        """From now on the sharded model moves with every view, and with it the states of these optimizers.

        Raises:
            UnsupportedError: if a state cannot move between slots.
        """
        assert self.member is not None
        place = None if self._entered is None else place_of(self._entered, self.membership.seat)
        self._keeper = ShardKeeper(self.member.model, optimizers, place)

    def admit(self) -> Any:
        """A joiner, ready to train: wait until the others let it in, and get what they hold.

        Returns:
            The leader's dowry.

        Raises:
            MembershipError: if nobody is left to join, or the model is another than theirs.
        """
        self._pending = self.membership.agree(Standing(fresh=True))
        self.arrived = self.applied = self._pending.step
        self._settle_in()
        return self.dowry

    def connect(self) -> None:
        """A joiner at its first step: from here on it takes part in everything."""
        if not self.is_alone:
            return
        self.is_alone = self.membership.is_guest = False
        assert self.member is not None and self._channels is not None
        self.member.enter_view(self.topology, self._rank(), self._channels)
        self._tell("on_change", self._event())
        self.enter()

    def enter(self) -> None:
        """At the entry of whatever communicates: make the change that a new view asks for, leave an ended generation.

        Raises:
            ShardsLost: if some part of the model has no live holder; said alike by all survivors.
        """
        if not self.is_alone:
            self._settle_in()

    def _settle_in(self) -> None:
        while True:
            try:
                self._change()
                self.membership.abort.check()
                return
            except RuntimeError as error:
                self.leave_and_agree(error)

    def begin_phase(self, phase: str) -> None:
        """Tell where in the step this member is."""
        self.membership.progress.phase = phase

    def _rank(self) -> int:
        return self.topology.members.index(self.membership.seat)

    # First half: agree

    def leave_and_agree(self, error: Exception) -> None:
        """Leave a generation for the next view, as often as that fails too.

        Raises:
            Exception: ``error`` itself, if it is this member's own.
        """
        while True:
            ended = self.membership.abort
            before = self.membership.view.generation
            began = time.monotonic()
            self.membership.leave(error)
            self._left_because, self._left_at = ended.reason or str(error), self._left_at or began
            self._tell("on_failure", FailureEvent(before, self.applied + 1, self._left_because))
            try:
                self._pending = self.membership.agree(self._standing())
            except GenerationOver as again:
                error = again
                continue
            self._tell("on_view", self._event())
            return

    def agree_as_planned(self) -> None:
        """At the start of a step, on all members alike: agree on a view that lets joiners in."""
        self._left_because, self._left_at = "planned", time.monotonic()
        try:
            self._pending = self.membership.agree(self._standing(admits=True))
            self._tell("on_view", self._event())
        except GenerationOver as error:
            self.leave_and_agree(error)

    def hand_over(self, leaving: Sequence[Seat]) -> None:
        """At the start of a step, on all members alike: some leave, and give what they hold to those that stay.

        It goes over the channels that are there, so that a failure in the middle finds all of them still members.

        Raises:
            Drained: on those that leave, once nobody needs them any more.
        """
        before, me = self._entered, self.membership.seat
        assert before is not None and self._keeper is not None and self.member is not None
        log.info("generation %d: %s leave", before.generation, ", ".join(map(str, leaving)))
        after = view_without(before, leaving)
        count, none = len(self._keeper.held()), self.distrusted
        held = {seat: () if seat in none else ((place_of(before, seat),),) * count for seat in before.members}
        peers = [
            PeerState(held[seat], place_of(after, seat) if seat in after.members else None)
            for seat in before.members
        ]
        self.member.leave_view()
        try:
            self.moves.append(self._keeper.move(self.member.world, peers))
            self.member.world.all_reduce(torch.zeros(1, device=self._device), tag="handed over")
        except RuntimeError as error:
            self.leave_and_agree(error)
            return
        if me in leaving:
            self._depart()
        self.agree_as_planned()

    def _depart(self) -> None:
        self.has_left = self.is_alone = True
        for observer in self.observers:
            observer.on_leave()
        self.membership.depart()
        raise Drained(f"{self.membership.seat} has handed over its part and leaves")

    def _standing(self, admits: bool = False) -> Standing:
        vote = None if self._last_vote is None else {"step": self._last_vote[0], **self._last_vote[1].to_json()}
        held = () if self._keeper is None else self._keeper.held()
        record = Record(held, self._outside, self._evaluated, self.splits, self.gives_up, self._lacks_dowry)
        return Standing(self.arrived, self.applied, vote, record.to_json(), admits=admits)

    # Second half: change

    def _change(self) -> None:
        view = self._pending
        if view is None:
            return
        with torch.inference_mode(False):  # what a change makes outlives an evaluation loop
            self._enter_view(view)
        self.stand_in(view)

    def _enter_view(self, view: View) -> None:
        began, report = time.monotonic(), MoveReport()
        event = self._event()
        if self.member is not None:
            self.member.leave_view()
        self._close_world()
        rank = view.rank(self.membership.seat)
        channels = self._open(view, rank)
        opened = time.monotonic()
        if self.member is not None:
            report = self._move(view, rank)
            own = lone_channels(view.topology, rank) if self.is_alone else channels
            self.member.enter_view(view.topology, rank, own)
        moved = time.monotonic()
        self.membership.run()
        self.agreed, self.distrusted = Wishes(stop=self.agreed.stop), frozenset()
        is_first, self._entered, self._pending = self._entered is None, view, None
        seconds = {"agree": began - (self._left_at or began), "open": opened - began, "move": moved - opened}
        self._left_at, self._changed_at = 0.0, view.step + 1
        self._follow_splits(view)
        if not is_first:
            self.moves.append(report)
        seconds["total"] = sum(seconds.values())
        log.info("generation %d: degrees %s, %s", view.generation, dict(event.degrees_after), event.cause)
        sent, received = report.sent_bytes, report.received_bytes
        self._tell("on_change", replace(event, seconds=seconds, sent_bytes=sent, received_bytes=received))

    def _move(self, view: View, rank: int) -> MoveReport:
        if self._keeper is None:
            return MoveReport()
        handle = world_handle(view.topology.world_size, rank, self.membership.progress, self.membership.abort)
        world = Exchange(handle)
        self._give_dowry(view, rank, world)
        return self._keeper.move(world, peer_states(view))

    def _follow_splits(self, view: View) -> None:
        """All slots of a replica run a micro-batch in equal passes; at its full degree it needs no smaller ones."""
        mine = self.membership.seat.replica
        records = [holdings_of(view, seat) for seat in view.members if seat.replica == mine]
        self.splits = max((record.splits for record in records), default=0)
        if len(records) == view.nominal_degree:
            self.splits = 0

    def _give_dowry(self, view: View, rank: int, world: Exchange) -> None:
        """The leader tells joiners what all others know."""
        assert self._keeper is not None
        lacking = [seat for seat in view.members if holdings_of(view, seat).lacks_dowry]
        if not lacking:
            return
        leader, dowry = view.topology.leader, None
        if rank == leader:
            counts = self._outside, self._evaluated, self._last_vote
            try:
                dowry = self._keeper.schema(), counts, self.make_dowry(), ""
            except Exception as error:  # user code is asked for states; the job must not end because somebody joins
                log.exception("the leader has no dowry for %s", ", ".join(map(str, lacking)))
                dowry = None, counts, None, f"{type(error).__name__}: {error}"
        schema, counts, gift, problem = broadcast_object(world, dowry, leader)
        if not self._lacks_dowry:
            return
        if problem:
            raise Fenced(f"{self.membership.seat} cannot join: the leader has no dowry: {problem}")
        try:
            self._keeper.adopt(schema)
        except (MembershipError, UnsupportedError) as error:
            raise Fenced(f"{self.membership.seat} cannot join: {error}") from None  # only this process ends
        self._outside, self._evaluated, self._last_vote = counts
        self.dowry, self._lacks_dowry = gift, False

    def stand_in(self, view: View) -> None:
        """After a change: do what another member needs to finish what it was stopped in."""

    def _open(self, view: View, rank: int) -> Channels:
        limits, progress = self.membership.timeouts, self.membership.progress
        self.begin_phase("change")
        self._world = GenerationWorld(
            view.generation,
            self._store,
            self.membership.abort,
            timeout=timedelta(seconds=limits.collective_s),
            build_s=limits.build_s,
        )
        self._world.open(rank, view.topology.world_size, "cuda:nccl" if self._backend == "nccl" else "")
        self._channels = open_channels(
            view.topology, rank, backend=self._backend, world=self._world, progress=progress
        )
        return self._channels

    def _close_world(self) -> None:
        if self._channels is not None:
            self._channels.forget()
            self._channels = None
        if self._world is not None:
            self._world.close()
            self._world = None

    # Telling

    def _event(self) -> ViewEvent:
        return ViewEvent.between(self._entered or self.view, self.view, self._left_because)

    def _tell(self, name: str, event: Any) -> None:
        for observer in self.observers:
            getattr(observer, name)(event)
