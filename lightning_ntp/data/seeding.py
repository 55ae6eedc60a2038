"""Random numbers for data that are the same in every process that loads the same samples.

The tensor-parallel ranks of a replica load a batch each for itself and must get the same one, random transforms
included. So everything random about data runs under seeds derived from what is loaded, never from who loads it.

Forked are the global generators of torch (CPU), numpy and Python; the CUDA generators are left alone.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that is a function of ``parts`` alone: the same in every process and every run."""
    digest = hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_global(seed: int) -> None:
    """Seed the global CPU generators of torch, numpy and Python."""
    # Not torch.manual_seed: it would reseed the CUDA generators, which belong to the model (dropout).
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextmanager
def forked_rng(seed: int | None = None) -> Iterator[None]:
    """Run a block under its own random numbers; afterwards the global generators are as before.

    Args:
        seed: Seed for the block; None leaves seeding to the block.
    """
    outside = _collect()
    try:
        if seed is not None:
            seed_global(seed)
        yield
    finally:
        _restore(outside)


class RandomStream:
    """Random numbers of its own for something that runs in pieces, such as an iterator pulled between steps."""

    def __init__(self, seed: int) -> None:
        with forked_rng(seed):
            self._inside = _collect()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Swap this stream's generators in for a block; the next block goes on where this one ended."""
        with forked_rng():
            _restore(self._inside)
            try:
                yield
            finally:
                self._inside = _collect()


def _collect() -> tuple[Any, Any, Any]:
    return torch.default_generator.get_state(), np.random.get_state(), random.getstate()


def _restore(states: tuple[Any, Any, Any]) -> None:
    torch.default_generator.set_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
