"""A member that trains on when others die: recovery in two halves around the steps.

*Agree, inside the failing call.* A member that meets a failure leaves all collectives and agrees on the next view. The
view commits step c. A member that was in the vote on c gets the decided vote and finishes the step as if nothing had
happened; a member that had not arrived at the step yet runs it again.

*Change, at the next entry.* Whatever communicates begins with :meth:`Survivor.enter`: a step, an evaluation step, a
collective outside the steps. All members run the same program, so the entries at which they change are each one's own,
but the change is one collective act.

Nothing is ever undone: a step is applied only after the vote on it, and passing the vote means that all had arrived.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ntp.comm.exchange import Exchange
from lightning_ntp.engine.crossing import Crossing
from lightning_ntp.engine.departure import leavers
from lightning_ntp.engine.events import CorruptionEvent
from lightning_ntp.engine.record import holdings_of
from lightning_ntp.engine.settle import count_ballots
from lightning_ntp.engine.snapshot import snapshot_of
from lightning_ntp.engine.verify import Verification
from lightning_ntp.engine.vote import Vote, Wishes
from lightning_ntp.errors import GenerationOver, MembershipError, NTPError
from lightning_ntp.membership.events import last_words
from lightning_ntp.membership.view import View
from lightning_ntp.topology import Seat

log = logging.getLogger(__name__)

T = TypeVar("T")

_TIGHT_STEPS = 3
"""A failed allocation so many steps after a change of view is taken for a consequence of it."""


class Replay(NTPError):
    """The step under way was not committed and has to be run again. Raised by ``vote``, caught around the step."""


class Survivor(Crossing):
    """One member of a job that goes on through deaths. Works with and without a Trainer.

    Args:
        arguments: Of :class:`Crossing`.

    Attributes:
        wants_stop: Set it to ask all members to stop at the next step.
        wants_to_leave: Set it to hand over this member's part and leave at the next step.
        verify_every_n_steps: Set it before ``own`` to compare the members' weights every so many steps.
        before_step: Functions that are called with a step's number before each run of it.
        agreed: What the last vote has agreed to do.
    """

    tolerates_failures = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._last_evaluation: Callable[[], None] | None = None
        self._depth = 0
        self.wants_stop = self.wants_to_leave = False
        self.verify_every_n_steps: int | None = None
        self._verification: Verification | None = None
        self.before_step: list[Callable[[int], None]] = []

    def own(self, optimizers: Sequence[Optimizer]) -> None:
        """As :meth:`Crossing.own`.

        Raises:
            ConfigError: if ``verify_every_n_steps`` is no number of steps.
            UnsupportedError: if a state cannot move, or weights are to be verified that differ without any fault.
        """
        super().own(optimizers)
        self._verification, every = None, self.verify_every_n_steps
        if every is not None:
            assert self.member is not None
            can_differ = self._lowest_degree < self.founding.nominal_degree or not self.founding.is_uniform
            self._verification = Verification(self.member, optimizers, every, can_differ)

    def finish(self) -> None:
        """End when all members have done their last step; until then, help those that recover."""
        while True:
            self.enter()
            try:
                self.membership.finish()
                break
            except RuntimeError as error:
                self.leave_and_agree(error)
        if self.member is not None:
            self.member.stop_sync()
        self._close_world()

    # Units: what is run again when a failure interrupts it

    def enter(self) -> None:
        """As :meth:`Crossing.enter`. Inside a unit nothing happens: there a failure ends the whole unit."""
        if not self._depth:
            super().enter()

    def enter_step(self) -> None:
        """At the entry of a step: besides, whatever the last vote has planned for now."""
        self.connect()
        self.enter()
        agreed, self.agreed = self.agreed, Wishes(stop=self.agreed.stop)
        leaving = self._leaving(agreed.leave)
        if leaving:
            self.hand_over(leaving)
            self.enter()
        elif agreed.admit:
            self.agree_as_planned()
            self.enter()

    @contextmanager
    def unit(self) -> Iterator[None]:
        """Inside, failures are raised: the whole is run again by whoever opened the unit."""
        before, self._depth = self._depth, self._depth + 1
        try:
            yield
        finally:
            self._depth = before

    def end_unit(self) -> None:
        """From here to its end the unit is not run again: what fails now is recovered like anything outside."""
        self._depth = 0

    @property
    def is_between(self) -> bool:
        """Whether a view is agreed on and the step that it commits is being finished: no channel leads anywhere."""
        return self._pending is not None and self._depth > 0

    def check_swallowed(self) -> None:
        """After user code has returned: it must not have caught the error of a collective.

        Raises:
            GenerationOver: if it has; what it returned is worth nothing.
        """
        where = self.membership.progress.failed_in
        if where is not None and self._pending is None:
            raise GenerationOver(f"a collective on {where!r} failed, and user code went on all the same")

    def outside(self, run: Callable[[], T]) -> T:
        """Run collectives outside the steps, all members the same ones, until they are complete on every member.

        They end with a barrier. So a member that is through proves that all others have their results, too: one that a
        failure stops in the barrier keeps its result if somebody is through, and else all run it again.
        """
        if self._depth or self.is_alone:
            return run()
        number, results = self._outside, []
        while True:
            self.enter()
            if results and self._is_passed(number):
                break
            self.begin_phase("outside")
            try:
                with self.unit():
                    results = [run()]
                    self._barrier(number)
                break
            except RuntimeError as error:
                self.leave_and_agree(error)
        self._outside = number + 1
        return results[0]

    def evaluate(self, run: Callable[[], T], take_snapshot: Callable[[], Callable[[], None]]) -> T:
        """Run an evaluation step as a unit.

        Args:
            run: The step. Another slot may need it once more after this slot is through: then it is run for its
                collectives alone.
            take_snapshot: Returns a function that restores what a second run must find.
        """
        if self._depth or self.is_alone:
            return run()
        self.enter()
        restore = take_snapshot()
        while True:
            self.enter()
            self.begin_phase("evaluation")
            try:
                with self.unit():
                    result = run()
                self.check_swallowed()
                break
            except RuntimeError as error:
                self.leave_and_agree(error)
            restore()

        def once_more() -> None:
            undo = take_snapshot()
            restore()
            try:
                run()
            finally:
                undo()

        self._last_evaluation = once_more
        self._evaluated += 1
        return result

    def run_step(self, step_fn: Callable[[Any], T], batch: Any) -> T:
        """Run one step until it is committed; a step that a failure interrupts is run again in the next view.

        Args:
            step_fn: Forward, backward and ``commit`` of one step, from its batch.
            batch: The batch, or a function of the view that draws it: after a failure replicas may take other shares.

        Returns:
            What ``step_fn`` returns in its last run.

        Raises:
            ShardsLost: if some part of the model has no live holder; said alike by all survivors.
            RuntimeError: the user's own.
        """
        self.enter_step()
        assert self.member is not None
        restore = snapshot_of(self.member.model.module)
        while True:
            self.enter()
            self.begin_step()
            try:
                with self.unit():
                    return step_fn(batch(self.view) if callable(batch) else batch)
            except Replay as reason:
                log.info("%s", reason)
            except RuntimeError as error:
                # The error must be gone before anything changes shape: its frames hold the graph of the failed pass.
                self.leave_and_agree(error)
            restore()

    # The parts of a step

    def commit(self, optimizer: Optimizer, max_norm: float | None = None) -> Vote:
        """Vote on the synced gradients, clip, and take the optimizer's step.

        Raises:
            Replay: if the step was not committed; ``run_step`` runs it again.
        """
        assert self.member is not None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        vote = self.vote(parameters)
        if max_norm is not None:
            self.member.clip(parameters, vote, max_norm)
        optimizer.step()
        self.applied_step()
        return vote

    def begin_step(self) -> None:
        """Tell whoever looks for the culprit of a hang that a step begins."""
        self.membership.progress.step = self.applied + 1
        for function in self.before_step:
            function(self.applied + 1)
        self.begin_phase("forward")

    def vote(self, parameters: Sequence[nn.Parameter]) -> Vote:
        """Agree that a step's gradients are complete.

        Raises:
            Replay: if the step is not committed: it has to be run again.
        """
        assert self.member is not None
        self.check_swallowed()  # before it says that its gradients are complete
        step = self.arrived = self.applied + 1
        self.begin_phase("vote")
        try:
            self.membership.abort.check()
            vote = self._cast(parameters, step)
        except RuntimeError as error:
            self.leave_and_agree(error)
            vote = self._settle(step, parameters)
        self._last_vote = (step, vote)
        self.agreed = vote.wishes
        self._suspect()
        self.begin_phase("step")
        return vote

    def _cast(self, parameters: Sequence[nn.Parameter], step: int) -> Vote:
        assert self.member is not None and self._entered is not None
        if self._verification is None:
            return self.member.vote(parameters, self._wishes())
        return self._verification.vote(parameters, self._wishes(), step, self._entered.generation)

    def _suspect(self) -> None:
        """Tell what the vote has found. A member that certainly deviates asks to leave, and will hand nothing over.

        The step under way is committed as it is.
        """
        found = None if self._verification is None else self._verification.take()
        if found is None:
            return
        assert self._entered is not None
        me = self.membership.seat
        if found.is_certain:
            self.distrusted = frozenset(found.seats)
            self.wants_to_leave |= me in found.seats
        if self.is_leader or me in found.seats:
            log.error("%s", found)
        self._tell("on_corruption", CorruptionEvent(**vars(found), generation=self._entered.generation))

    def enter_run(self) -> None:
        """Before each run of a step: replicas leave that are too thin, or have no memory for it at their degree.

        On all members alike: whoever runs a step comes by here, the first time and after every change of view.
        """
        self.enter()
        while leaving := self._leaving():
            self.hand_over(leaving)
            self.enter()

    def leave_out_of_memory(self, error: Exception, can_split: bool) -> None:
        """A pass did not fit. Right after a change of view that is a consequence: smaller passes, or this replica goes.

        Args:
            error: What was raised.
            can_split: Whether passes can still be halved.

        Raises:
            Exception: ``error``, if the view has not changed of late: then it is the user's own.
        """
        view = self._entered
        assert view is not None
        if view.generation > 0 and self.applied + 1 < self._changed_at + _TIGHT_STEPS:
            self.splits += can_split
            self.gives_up = not can_split
            text = last_words(str(error))
            error = GenerationOver(f"{self.membership.seat} ran out of memory at its new degree: {text}")
            log.warning("%s", error)
        self.leave_and_agree(error)

    def _leaving(self, asked: Sequence[int] = ()) -> list[Seat]:
        assert self._entered is not None
        return leavers(self._entered, asked, self._lowest_degree)

    def _wishes(self) -> Wishes:
        leaves = self.wants_to_leave or self.membership.is_asked_to_leave
        leave = (self._rank(),) if leaves else ()
        return Wishes(stop=self.wants_stop, admit=self.membership.joiner_waits, leave=leave)

    def applied_step(self) -> None:
        """The optimizer has taken the step that was voted on."""
        self.applied = self.arrived
        if self._pending is None and self._keeper is not None:
            self._keeper.forget_kept()
        self.begin_phase("between")

    def _settle(self, step: int, parameters: Sequence[nn.Parameter]) -> Vote:
        """The vote on ``step``, as the new view knows it or as the survivors can count it."""
        assert self.member is not None
        while True:
            view = self._pending
            assert view is not None
            if view.step < step:
                self.arrived = view.step
                raise Replay(f"step {step} is not committed in generation {view.generation}: it is run again")
            if view.vote is not None:
                return self.member.ballot.settle(parameters, Vote.from_json(view.vote))
            try:
                return count_ballots(self.membership, self.member.ballot, view, parameters, self.wants_stop)
            except GenerationOver as error:
                self.leave_and_agree(error)

    def stand_in(self, view: View) -> None:
        """Run the last evaluation step once more if another slot of this replica was stopped in it."""
        mine = self.membership.seat
        behind = any(
            holdings_of(view, seat).evaluated < self._evaluated
            for seat in view.members
            if seat.replica == mine.replica and seat in view.holdings
        )
        if behind and self._last_evaluation is not None:
            self.begin_phase("evaluation")
            with self.unit():
                self._last_evaluation()

    def _is_passed(self, number: int) -> bool:
        """Whether some member is through collective ``number``, as it told when the present view was made."""
        view = self.view
        return any(holdings_of(view, seat).outside > number for seat in view.members if seat in view.holdings)

    def _barrier(self, number: int) -> None:
        """Wait for all members, and make sure that all of them mean the same collective.

        Raises:
            MembershipError: if they do not: values would have met that do not belong together.
        """
        assert self._channels is not None
        numbers = torch.tensor([number, -number])
        Exchange(self._channels.control).all_reduce(numbers, op="max", tag="barrier")
        highest, lowest = numbers[0].item(), -numbers[1].item()
        if highest != lowest:
            raise MembershipError(
                f"collectives outside the steps do not match: some member is at number {lowest}, another at {highest}: "
                "all members must log, reduce and save the same things in the same order"
            )
