"""Random numbers of a replica: equal on all slots where activations are replicated, different where they are local.

Dropout on a replicated activation must draw the same mask on every slot, or the slots' copies drift apart; on local
heads or columns each slot should draw its own. Between a column- and a row-parallel layer activations are local: there
this member draws from a generator of its own, seeded from the common one, so that a recomputed forward draws the same
again.
"""

from __future__ import annotations

import torch

# Large odd factor: neighbouring slots get unrelated seeds.
_SLOT_STRIDE = 0x9E3779B97F4A7C15
_SEED_SPACE = 2**63
# Seeds of local regions have this bit, all others do not: the generator itself tells whether a region is open.
_LOCAL = 2**63


class LocalRandom:
    """The default generators, switched to a slot's own stream inside a local region.

    Both streams follow from the region's seed, and nothing is remembered here. So activation checkpointing, which puts
    the generators back before it recomputes, may begin and end anywhere in a region.

    Args:
        slot: This member's slot.
    """

    def __init__(self, slot: int) -> None:
        self._shift = (slot + 1) * _SLOT_STRIDE

    def enter(self, device: torch.device) -> None:
        """Begin a local region; a second call inside it changes nothing, nor does one on the meta device."""
        if device.type == "meta" or self._is_inside():
            return
        drawn = int(torch.randint(_SEED_SPACE - 1, (), dtype=torch.int64))
        _seed(device, _LOCAL + (drawn + self._shift) % _SEED_SPACE)

    def leave(self, device: torch.device) -> None:
        """End a local region: go on with a common stream, seeded by what the region was entered with."""
        if device.type != "meta" and self._is_inside():
            _seed(device, (torch.default_generator.initial_seed() - self._shift) % _SEED_SPACE)

    @staticmethod
    def _is_inside() -> bool:
        return torch.default_generator.initial_seed() >= _LOCAL


def seed_replica(device: torch.device, *parts: int) -> None:
    """Seed the default generators from whole numbers, the same on every slot of a replica.

    Args:
        device: Its generator is seeded too if it is a CUDA device.
        parts: Such as (seed, epoch, window, micro-batch, replica).
    """
    seed = 0
    for part in parts:
        seed = (seed * 0x100000001B3 + part + _SLOT_STRIDE) % _SEED_SPACE
        seed ^= seed >> 29
    _seed(device, seed)


def _seed(device: torch.device, seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
