"""The vote: members agree that a step's gradients are complete, and on the numbers that all must share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ntp.comm.tree import ControlTree
from lightning_ntp.layout import Replicated
from lightning_ntp.parallel.model import ParallelModel, ParallelParameter
from lightning_ntp.sync import GradientSync
from lightning_ntp.topology import Topology


@dataclass(frozen=True)
class Wishes:
    """What members ask of all others; it rides in the vote, so that all hear of it at the same step.

    Attributes:
        stop: The job shall stop at the next step (SIGTERM).
        admit: Somebody waits to join.
        leave: Ranks that leave in an orderly way.
    """

    stop: bool = False
    admit: bool = False
    leave: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return self.stop or self.admit or bool(self.leave)


NO_WISHES = Wishes()


@dataclass(frozen=True)
class Vote:
    """What all members know after a vote.

    Attributes:
        grad_norm: 2-norm of the synced gradient of the dense parameters that were voted on.
        used: For each of them, whether any member had a gradient in this window, or one was kept from an earlier.
        wishes: What members ask for. Only the wish to stop outlives a failure: for the rest all agree anew anyway.
    """

    grad_norm: float
    used: tuple[bool, ...]
    wishes: Wishes = NO_WISHES

    def to_json(self) -> dict[str, Any]:
        """Plain data; the norm keeps all its bits."""
        used = "".join("01"[flag] for flag in self.used)
        return {"grad_norm": self.grad_norm.hex(), "used": used, "stop": self.wishes.stop}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Vote:
        """Read :meth:`to_json`.

        Raises:
            ValueError: if it is anything else.
        """
        used = tuple(bit == "1" for bit in data["used"])
        return cls(float.fromhex(data["grad_norm"]), used, Wishes(stop=bool(data["stop"])))


class Ballot:
    """Casts this member's votes.

    The norm is summed over the units that the lowest replica owns, each once, and travels in the vote; so all members
    use bitwise the same value, whatever their layouts.

    Args:
        model: What this member holds.
        sync: Knows which parameters got a gradient.
        tree: Reaches all members.
        topology: All members.
        rank: This member.
    """

    def __init__(
        self, model: ParallelModel, sync: GradientSync, tree: ControlTree, topology: Topology, rank: int
    ) -> None:
        self._sync, self._tree, self._rank, self._size = sync, tree, rank, topology.world_size
        self._replica = topology.place(rank)[0]
        self._context = model.context
        self._by_parameter = {param.parameter: param for param in model.parameters()}

    def cast(
        self, parameters: Sequence[nn.Parameter], wishes: Wishes = NO_WISHES, rider: Tensor | None = None
    ) -> Vote:
        """Vote on the parameters of one optimizer; those unused everywhere get ``.grad = None`` again.

        Args:
            parameters: Of the optimizer, in its order.
            wishes: This member's; in ``leave`` it can only name itself.
            rider: Float64 numbers that ride along, as many on all members; replaced by their sums over the members.
        """
        used = self._sync.used(parameters)
        leave = [rank in wishes.leave and rank == self._rank for rank in range(self._size)]
        flags = [float(flag) for flag in (wishes.stop, wishes.admit, *leave, *used)]
        ballot = torch.tensor([self._owned_square(parameters), *flags], dtype=torch.float64)
        if rider is not None:
            ballot = torch.cat([ballot, rider.flatten()])
        total = self._tree.sum(ballot, tag="vote")
        if rider is not None:
            total, sums = total.tensor_split([len(total) - rider.numel()])
            rider.copy_(sums.view_as(rider))
        square, *counts = total.tolist()
        stop, admit, *found = (count > 0 for count in counts)
        leaving = tuple(rank for rank in range(self._size) if found[rank])
        return self.settle(parameters, Vote(square**0.5, tuple(found[self._size :]), Wishes(stop, admit, leaving)))

    def settle(self, parameters: Sequence[nn.Parameter], vote: Vote) -> Vote:
        """Let this member's gradients follow a vote, its own or one that the others have told it."""
        self._sync.settle_used(parameters, vote.used)
        for parameter, is_used in zip(parameters, vote.used, strict=True):
            if not is_used:
                parameter.grad = None
        return vote

    def used(self, parameters: Sequence[nn.Parameter]) -> list[bool]:
        """This member's part of the used bitmap."""
        return self._sync.used(parameters)

    def square_among(self, parameters: Sequence[nn.Parameter], places: Sequence[tuple[int, int]], me: int) -> float:
        """This member's part of the squared norm, if only some members are left to count.

        Args:
            parameters: Those that are voted on, with their synced gradients.
            places: (degree, slot) of every member that is left; each unit is counted by the first that holds it.
            me: This member's position among them.
        """
        total = 0.0
        for parameter in parameters:
            param = self._by_parameter[parameter]
            for part in [] if parameter.grad is None else _counted(parameter.grad, param, places, me):
                total += float(torch.linalg.vector_norm(part, dtype=torch.float64).square())
        return total

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> float:
        """2-norm of the dense gradient of these parameters, without a vote. All members must ask."""
        square = torch.tensor([self._owned_square(parameters)], dtype=torch.float64)
        return float(self._tree.sum(square, tag="norm")) ** 0.5

    def _owned_square(self, parameters: Sequence[nn.Parameter]) -> float:
        if self._replica != 0:
            return 0.0
        squares = [
            torch.linalg.vector_norm(part, dtype=torch.float64).square()
            for parameter in parameters
            if parameter.grad is not None
            for part in self._owned(parameter.grad, self._by_parameter[parameter])
        ]
        return float(torch.stack(squares).sum()) if squares else 0.0

    def _owned(self, grad: Tensor, param: ParallelParameter) -> list[Tensor]:
        """The parts of a local gradient that this slot counts: every unit of the replica counts once."""
        degree, slot, layout = self._context.degree, self._context.slot, param.layout
        if isinstance(layout, Replicated):
            return [grad] if slot == 0 else []
        if not layout.is_shared(degree):
            return [grad]
        return [
            grad.narrow(layout.dim, piece.local_row, piece.rows)
            for piece in layout.pieces(degree, slot)
            if layout.segments[piece.segment].family.at(degree).owners[piece.unit] == slot
        ]


def _counted(grad: Tensor, param: ParallelParameter, places: Sequence[tuple[int, int]], me: int) -> list[Tensor]:
    """The parts of a gradient that nobody before this member holds."""
    layout = param.layout
    if isinstance(layout, Replicated):
        return [grad] if me == 0 else []
    earlier = {
        (piece.segment, piece.unit) for degree, slot in places[:me] for piece in layout.pieces(degree, slot)
    }
    return [
        grad.narrow(layout.dim, piece.local_row, piece.rows)
        for piece in layout.pieces(*places[me])
        if (piece.segment, piece.unit) not in earlier
    ]


def clip_by_norm(parameters: Sequence[nn.Parameter], grad_norm: float, max_norm: float) -> None:
    """Scale gradients so that their norm is at most ``max_norm``, as ``torch.nn.utils.clip_grad_norm_`` does.

    Args:
        parameters: Local parameters.
        grad_norm: Norm of the dense gradient, from the vote.
        max_norm: Largest norm to leave.
    """
    factor = min(1.0, max_norm / (grad_norm + 1e-6))
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if grads:
        torch._foreach_mul_(grads, factor)
