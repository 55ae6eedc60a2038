"""The members' votes on the steps of each optimizer, and gradient clipping by the norm that they find."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ntp.compat.torch import version_of
from lightning_ntp.engine import Member, Vote, clip_by_norm
from lightning_ntp.engine.plain import Plain
from lightning_ntp.engine.survivor import Survivor
from lightning_ntp.errors import UnsupportedError

# Which tensors the gradients are and how often each was written to.
_State = tuple[tuple[int, int], ...]


class Votes:
    """The votes of one fit.

    Args:
        engine: Has this member, and agrees on steps. The member's gradient sync must have been started.
    """

    def __init__(self, engine: Plain | Survivor) -> None:
        self._engine = engine
        self._cast: WeakKeyDictionary[Optimizer, tuple[int, Vote, _State]] = WeakKeyDictionary()

    @property
    def _member(self) -> Member:
        return self._engine.member

    def forget(self) -> None:
        """A new view has begun, with a gradient sync of its own."""
        self._cast.clear()

    def of(self, optimizer: Optimizer | LightningOptimizer) -> Vote:
        """The vote on the optimizer's gradients; cast now unless nothing was synced since the last one."""
        return self._of(unwrapped(optimizer))[1]

    def clip_by_norm(self, optimizer: Optimizer | LightningOptimizer, clip_val: float) -> None:
        """As ``torch.nn.utils.clip_grad_norm_`` on the dense gradient.

        The norm is the vote's, and asked for again only if a hook has written to the gradients since. (Writing through
        ``.data`` is not seen.)
        """
        optimizer = unwrapped(optimizer)
        parameters = parameters_of(optimizer)
        _, vote, state = self._of(optimizer)
        is_unchanged = _state(parameters) == state
        if not is_unchanged and self._engine.is_between:
            raise UnsupportedError(
                "a hook has changed the gradients after the vote, and a member died before all knew their norm: this "
                "step cannot be finished alike; change gradients in backward hooks instead"
            )
        norm = vote.grad_norm if is_unchanged else self._member.grad_norm(parameters)
        clip_by_norm(parameters, norm, float(clip_val))

    def total_norm(self, grads: Sequence[Tensor], norm_type: float) -> Tensor | None:
        """Norm of the dense gradient for a user's own ``clip_grad_norm_``; ``None`` if these are no gradients of ours.

        Raises:
            UnsupportedError: for another norm than the 2-norm, or if only some are the model's.
        """
        wanted = {id(grad) for grad in grads}
        ours = [p.parameter for p in self._member.model.parameters() if id(p.parameter.grad) in wanted]
        if not ours:
            return None
        if norm_type != 2.0 or len(ours) != len(wanted):
            raise UnsupportedError(
                f"clip_grad_norm_(norm_type={norm_type}) over {len(wanted)} gradients, {len(ours)} of them the model's"
                ": only the 2-norm of the model's own gradients is known across members; use "
                "Trainer(gradient_clip_val=...)"
            )
        return grads[0].new_tensor(self._member.grad_norm(ours), dtype=torch.float64)

    def _of(self, optimizer: Optimizer) -> tuple[int, Vote, _State]:
        syncs = self._member.sync.num_syncs
        cast = self._cast.get(optimizer)
        if cast is None or cast[0] != syncs:
            parameters = parameters_of(optimizer)
            cast = syncs, self._engine.vote(parameters), _state(parameters)
            self._cast[optimizer] = cast
        return cast


def unwrapped(optimizer: Optimizer | LightningOptimizer) -> Optimizer:
    """The user's optimizer."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters that an optimizer steps, in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _state(parameters: Sequence[nn.Parameter]) -> _State:
    grads = [parameter.grad for parameter in parameters]
    return tuple((0, 0) if grad is None else (id(grad), version_of(grad)) for grad in grads)
