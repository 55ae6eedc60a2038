"""Whether a replica's members have memory for what a decision asks of them, predicted before a view is taken.

A member holds its part of the weights, gradients and optimizer states, and the activations of one micro-batch. At a
lower degree both grow: the part by nominal/degree, and so do those activations that lie along the sharded dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ntp.errors import ConfigError


@dataclass(frozen=True)
class Memory:
    """Bytes of one member at nominal degree, as measured or planned.

    Attributes:
        state: Weights, gradients and optimizer states.
        replicated: The part of ``state`` that every member has whole.
        activations: Of one sample.
        replicated_activations: The part of ``activations`` that every member has whole.
        capacity: What the device has for all of it.
    """

    state: int
    activations: int
    capacity: int
    replicated: int = 0
    replicated_activations: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.replicated <= self.state and 0 <= self.replicated_activations <= self.activations):
            raise ConfigError(f"{self}: the replicated part is between 0 and the whole")

    def needed(self, degree: int, nominal_degree: int, micro_batch: int) -> int:
        """Bytes of one member at ``degree`` with passes of ``micro_batch`` samples, rounded up."""
        sharded = self.state - self.replicated
        by_sample = self.activations - self.replicated_activations
        state = self.replicated - (-sharded * nominal_degree // degree)
        return state + micro_batch * (self.replicated_activations - (-by_sample * nominal_degree // degree))

    def largest_micro_batch(self, degree: int, nominal_degree: int, wanted: int) -> int:
        """The largest pass up to ``wanted`` that fits, by halving; 0 if not even one sample does."""
        size = wanted
        while size and self.needed(degree, nominal_degree, size) > self.capacity:
            size //= 2
        return size
