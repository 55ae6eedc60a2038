"""What a parallel module knows of its place: one object shared by all modules of a model, changed by a new view."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_ntp.comm.exchange import Exchange
from lightning_ntp.errors import ConfigError
from lightning_ntp.parallel.random import LocalRandom


@dataclass
class TensorParallelContext:
    """This member's slot in its replica.

    Attributes:
        nominal_degree: Degree of a replica in which nothing has failed; families of layouts start there.
        degrees: Every degree that may be reached; block sizes and checks look at all of them.
        degree: Degree of this replica now.
        slot: This member's slot now.
        exchange: Collectives of forward and backward inside the replica.
        random: Random streams of this slot; in step with ``slot``.
    """

    nominal_degree: int
    degrees: tuple[int, ...]
    degree: int
    slot: int
    exchange: Exchange
    random: LocalRandom = field(init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.slot < self.degree <= self.nominal_degree:
            raise ConfigError(
                f"slot={self.slot} of degree={self.degree} does not exist at tensor_parallel_size={self.nominal_degree}"
            )
        self.random = LocalRandom(self.slot)

    @classmethod
    def at(
        cls, exchange: Exchange, degree: int, slot: int, nominal_degree: int, lowest_degree: int = 1
    ) -> TensorParallelContext:
        reachable: Iterable[int] = range(nominal_degree, min(lowest_degree, degree) - 1, -1)
        return cls(nominal_degree, tuple(reachable), degree, slot, exchange)

    def move_to(self, exchange: Exchange, degree: int, slot: int) -> None:
        """Take another place: all modules that share this context follow once they are told to ``relocate``."""
        self.exchange, self.degree, self.slot = exchange, degree, slot
        self.__post_init__()
