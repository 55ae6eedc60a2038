"""What a second run of a step must find as the first did."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@dataclass
class RandomState:
    """The states of all random number generators of this process: torch (CPU and current device), numpy, Python."""

    cpu: Tensor
    device: Tensor | None
    numpy: Any
    python: Any

    @classmethod
    def take(cls) -> RandomState:
        # The current device only: to ask all of them would make a context on each.
        device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return cls(torch.get_rng_state(), device, np.random.get_state(), random.getstate())

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


@dataclass
class BufferState:
    """The values of a module's buffers (running statistics)."""

    values: list[tuple[Tensor, Tensor]]

    @classmethod
    def take(cls, buffers: Iterable[Tensor]) -> BufferState:
        return cls([(buffer, buffer.detach().clone()) for buffer in buffers])

    @torch.no_grad()
    def restore(self) -> None:
        for buffer, before in self.values:
            if buffer.shape == before.shape:
                buffer.copy_(before)


def snapshot_of(module: nn.Module) -> Callable[[], None]:
    """A function that puts random numbers and the module's buffers back to where they are now."""
    numbers, buffers = RandomState.take(), BufferState.take(module.buffers())

    def restore() -> None:
        numbers.restore()
        buffers.restore()

    return restore
