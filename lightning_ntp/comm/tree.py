"""A small reduction over all members: inside the replicas, over their leaders, and back."""

from __future__ import annotations

from torch import Tensor

from lightning_ntp.comm.exchange import Exchange


class ControlTree:
    """Sums CPU tensors of a few kilobytes over all members; the result is bitwise the same on all.

    Args:
        replica: All slots of this replica.
        leaders: Slot 0 of every replica; ``None`` on other slots.
    """

    def __init__(self, replica: Exchange, leaders: Exchange | None) -> None:
        self._replica, self._leaders = replica, leaders

    def sum(self, tensor: Tensor, tag: str = "") -> Tensor:
        """Sum ``tensor`` in place."""
        self._replica.all_reduce(tensor, tag=tag)
        if self._leaders is not None:
            self._leaders.all_reduce(tensor, tag=tag)
        return self._replica.broadcast(tensor, source=0, tag=tag)
