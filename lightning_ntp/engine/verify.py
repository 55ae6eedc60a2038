"""Silent corruption: fingerprints of the weights ride in the vote, and a member that deviates is named.

Equal units of all replicas are bitwise equal, whatever their degrees. So every few steps each replica's fingerprint, of
an eighth of the parameters in turn, goes with the ballot: no collective more than without. What is compared are the
weights before the step's update.

Only if fingerprints differ, two more rounds say where: which parameters differ, then for each of their units what every
holder has. A unit of which more than half of the holders agree names the others. With two replicas a sharded unit has
two copies, and nobody can tell which is right: then both seats are suspected, and it is only reported.

The first vote in every view looks at all parameters and all that the optimizers keep for them: it proves the move.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ntp.engine.exact import refuse_inexact
from lightning_ntp.engine.fingerprint import Fingerprint, Turn
from lightning_ntp.engine.member import Member
from lightning_ntp.engine.vote import Vote, Wishes
from lightning_ntp.errors import ConfigError
from lightning_ntp.topology import Seat

log = logging.getLogger(__name__)

_LOOKED_AT = 32
"""Parameters whose units are compared after a mismatch; the others that differ are only named."""


@dataclass(frozen=True)
class Verdict:
    """What fingerprints that differ have shown.

    Attributes:
        step: The step in whose vote it was seen; its weights before the update differ.
        parameters: Names of those that differ between members.
        seats: Of the members that deviate; if not certain, of all that may. Empty if a second look found nothing, so
            that a fingerprint itself was wrong.
        is_certain: Most holders of the units in question agree, and the named seats are the others.
        after_change: It was the first vote in a view: the move may have done it.
    """

    step: int
    parameters: tuple[str, ...]
    seats: tuple[Seat, ...]
    is_certain: bool
    after_change: bool = False

    def __str__(self) -> str:
        if not self.seats:
            return f"step {self.step}: fingerprints of the weights differed, and at a second look did not"
        shown = ", ".join(self.parameters[:4]) + (f" and {len(self.parameters) - 4} more" * (len(self.parameters) > 4))
        where = "after the change of view " if self.after_change else ""
        who = " and ".join(map(str, self.seats))
        if self.is_certain:
            return f"step {self.step}: {who} {where}holds other bits of {shown} than most members: silent corruption"
        return (
            f"step {self.step}: {where}members hold different bits of {shown}, and no majority says which are right "
            f"(suspected: {who}): silent corruption; compare with a checkpoint, or run three replicas"
        )


class Verification:
    """Checks one member's weights against the others', through its votes. All members must have one.

    Args:
        member: This one; it may go from view to view.
        optimizers: Of the model.
        every_n_steps: After so many steps an eighth of the parameters is looked at; alike on all members.
        unequal: Whether replicas may have unequal degrees.

    Raises:
        ConfigError: if ``every_n_steps`` is not at least 1.
        UnsupportedError: if healthy members would differ, as an optimizer's update depends on the shape.
    """

    def __init__(self, member: Member, optimizers: Sequence[Optimizer], every_n_steps: int, unequal: bool) -> None:
        if not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ConfigError(
                f"verify_every_n_steps={every_n_steps!r} must be a whole number of at least 1, or None for never"
            )
        if unequal:
            refuse_inexact(optimizers, f"verify_every_n_steps={every_n_steps}")
        self._member, self._every = member, every_n_steps
        self._fingerprint = Fingerprint(member.model, optimizers)
        self._proved: int | None = None  # the generation in which everything was compared
        self._found: Verdict | None = None

    def vote(self, parameters: Sequence[nn.Parameter], wishes: Wishes, step: int, generation: int = 0) -> Vote:
        """The member's vote on a step, with a fingerprint if one is due.

        Args:
            parameters: As in ``Member.vote``.
            wishes: As in ``Member.vote``.
            step: Number of the step.
            generation: Of the view.
        """
        self._found = None
        is_first = generation != self._proved
        if step % self._every and not is_first:
            return self._member.vote(parameters, wishes)
        turn = self._fingerprint.everything if is_first else self._fingerprint.turn(step // self._every)
        rider = self._pack(self._fingerprint.of(turn))
        vote = self._member.vote(parameters, wishes, rider)
        if not _is_consistent(_unpack(rider)):
            self._found = self._look(turn, step, is_first)
        self._proved = generation
        return vote

    def take(self) -> Verdict | None:
        """What the last vote has found; to be taken once."""
        found, self._found = self._found, None
        return found

    def _look(self, turn: Turn, step: int, is_first: bool) -> Verdict:
        """Where members differ. All members come to the same result."""
        rider = self._pack(self._fingerprint.by_parameter(turn))
        by_replica = _unpack(self._member.tree.sum(rider, tag="fingerprints"))
        differing = [
            number for at, number in enumerate(turn.numbers) if not _is_consistent(by_replica[:, at].contiguous())
        ]
        ranks, is_certain = judge(self._copies(differing[:_LOOKED_AT], turn.states))
        names = tuple(self._fingerprint.name(number) for number in differing)
        seats = tuple(sorted(self._member.topology.members[rank] for rank in ranks))
        return Verdict(step, names, seats, is_certain, is_first)

    def _copies(self, numbers: Sequence[int], states: bool) -> list[dict[int, int]]:
        """For each unit of some parameters, the hash of every copy by the rank of its holder."""
        if not numbers:
            return []
        topology = self._member.topology
        hashes = torch.cat([self._fingerprint.by_unit(number, states) for number in numbers])
        told = self._member.control.all_gather_uneven(hashes, [len(hashes)] * topology.world_size, tag="units")
        by_rank, copies = [each.tolist() for each in told], []
        for number in numbers:
            by_replica = [self._fingerprint.holders(number, degree) for degree in topology.degrees]
            for slots in zip(*by_replica, strict=True):
                ranks = [topology.rank(replica, slot) for replica, held in enumerate(slots) for slot in held]
                copies.append({rank: by_rank[rank][len(copies)] for rank in ranks})
        return copies

    def _pack(self, sums: Tensor) -> Tensor:
        """Sums in their replica's row of a block for all replicas, in halves that a float64 adds exactly."""
        topology = self._member.topology
        block = torch.zeros(topology.num_replicas, 2, *sums.shape, dtype=torch.float64)
        block[self._member.replica] = torch.stack([sums >> 32, sums & (2**32 - 1)])
        return block


def _unpack(block: Tensor) -> Tensor:
    """(replicas, ...) int64: the sums of each replica, modulo 2**64."""
    upper, lower = block.to(torch.int64).unbind(1)
    return (upper << 32) + lower


def _is_consistent(sums: Tensor) -> bool:
    """Whether (replicas, 2) sums are equal in the first column and zero in the second."""
    return bool((sums[:, 0] == sums[0, 0]).all()) and not bool(sums[:, 1].any())


def judge(copies: Iterable[Mapping[int, int]]) -> tuple[set[int], bool]:
    """Who deviates.

    A unit of which more than half of the copies are equal names the holders of the others. A unit without such a
    majority is explained if a member that another unit has named holds it.

    Args:
        copies: For each unit the hash of every copy by its holder.

    Returns:
        The holders that deviate, and whether that is certain; else all holders that may.
    """
    named: set[int] = set()
    unclear: list[set[int]] = []
    for copy in copies:
        values = list(copy.values())
        usual = max(set(values), key=values.count, default=None)
        others = {holder for holder, value in copy.items() if value != usual}
        if not others:
            continue
        if 2 * len(others) < len(values):
            named |= others
        else:
            unclear.append(set(copy))
    unclear = [holders for holders in unclear if not holders & named]
    return named.union(*unclear), bool(named) and not unclear
