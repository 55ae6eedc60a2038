"""Training without recovery: the first failure ends the job."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from lightning_ntp.engine.events import CorruptionEvent, Observer
from lightning_ntp.engine.member import Member
from lightning_ntp.engine.verify import Verification
from lightning_ntp.engine.vote import NO_WISHES, Vote

log = logging.getLogger(__name__)

T = TypeVar("T")


class Plain:
    """Has the methods of ``Survivor`` that a strategy calls; each only does the thing itself.

    Args:
        member: This process's member.

    Attributes:
        verify_every_n_steps: Set it before ``own`` to compare the members' weights every so many steps.
        observers: Hear of weights that differ.
    """

    tolerates_failures = is_alone = False

    def __init__(self, member: Member) -> None:
        self.member = member
        self.verify_every_n_steps: int | None = None
        self.observers: list[Observer] = []
        self._verification: Verification | None = None
        self._steps = 0

    @property
    def is_leader(self) -> bool:
        return self.member.is_leader

    def own(self, optimizers: Sequence[Optimizer]) -> None:
        """Nothing ever moves; the optimizers are looked at if weights are to be verified.

        Raises:
            ConfigError: if ``verify_every_n_steps`` is no number of steps.
            UnsupportedError: if weights are to be verified that differ without any fault.
        """
        self._verification, every = None, self.verify_every_n_steps
        if every is not None:
            self._verification = Verification(self.member, optimizers, every, not self.member.topology.is_uniform)

    def enter(self) -> None:
        """No view ever changes."""

    def begin_phase(self, phase: str) -> None:
        """Nobody looks for the culprit of a hang."""

    is_between = False

    def end_unit(self) -> None:
        """Nothing is ever run again."""

    def outside(self, run: Callable[[], T]) -> T:
        return run()

    def evaluate(self, run: Callable[[], T], take_snapshot: Callable[[], Any]) -> T:
        return run()

    def vote(self, parameters: Sequence[nn.Parameter]) -> Vote:
        if self._verification is None:
            return self.member.vote(parameters)
        vote = self._verification.vote(parameters, NO_WISHES, self._steps)
        self._warn()
        return vote

    def applied_step(self) -> None:
        """A step has been taken."""
        self._steps += 1

    def _warn(self) -> None:
        """Tell what the vote has found; nobody can leave."""
        found = None if self._verification is None else self._verification.take()
        if found is None:
            return
        if self.is_leader or self.member.topology.members[self.member.rank] in found.seats:
            log.warning("%s", found)
        for observer in self.observers:
            observer.on_corruption(CorruptionEvent(**vars(found)))
