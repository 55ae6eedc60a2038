"""What the engine must know about the micro-batch in hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MicroBatch:
    """Facts about one item of a wrapped loader. Read it as ``loader.current`` while the item is in use.

    Attributes:
        epoch: The epoch it belongs to.
        window: Number of its global batch in this epoch.
        index: Its number in the window.
        count: Micro-batches of the window, the same on all replicas.
        sample_ids: This replica's samples in it, as the sampler named them; empty for a dummy and for streams.
        num_samples: How many samples of it count; 0 for a dummy.
        global_samples: Samples of the whole window over all replicas. ``num_samples / global_samples`` is its weight.
        is_dummy: Whether the item stands in for no samples at all: it is run so that collectives match, its gradients
            are dropped.
        passes: Sizes of the passes in which it is run, in samples. One, unless ``max_micro_batch`` splits it.
        extra: The collated batch and the size of every pass but the last. The item that the loader yielded is the last
            pass, so that whoever ignores passes of a loader without ``max_micro_batch`` misses nothing.
    """

    epoch: int
    window: int
    index: int
    count: int
    sample_ids: tuple[Any, ...]
    num_samples: int
    global_samples: int
    is_dummy: bool = False
    passes: tuple[int, ...] = ()
    extra: tuple[tuple[Any, int], ...] = ()

    @property
    def is_last(self) -> bool:
        """Whether the window ends with it."""
        return self.index == self.count - 1

    @property
    def last_samples(self) -> int:
        """Samples of the yielded item: those of the last pass."""
        return self.passes[-1] if self.passes else self.num_samples
