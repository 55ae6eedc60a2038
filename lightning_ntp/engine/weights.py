"""How much each micro-batch counts in the gradient of its window."""

from __future__ import annotations

from typing import Any

import torch

from lightning_ntp.data import MicroBatch
from lightning_ntp.errors import DataError
from lightning_ntp.sync import GradientSync


class WindowWeights:
    """Tells the gradient sync the weight of every backward.

    By default a micro-batch counts by its samples over those of the global batch. Where the step returns a ``weight``
    of its own (valid tokens), it counts by that, over the sum of all members' weights in the window.

    Args:
        sync: The member's gradient sync.
    """

    def __init__(self, sync: GradientSync) -> None:
        self._sync = sync
        self._weight_sum = 0.0

    def begin(self, micro: MicroBatch, samples: int, divided_by: int, is_last_pass: bool = True) -> None:
        """Before the forward of a pass: it counts by samples, unless ``weigh`` is called.

        Args:
            micro: The micro-batch that the pass belongs to.
            samples: Samples of this pass; 0 for a dummy.
            divided_by: By what the trainer will divide the loss (its accumulation); it is taken back.
            is_last_pass: Whether the micro-batch ends with it.
        """
        self._micro, self._divided_by = micro, divided_by
        self._is_last = micro.is_last and is_last_pass
        weight = 0.0 if micro.is_dummy else samples / micro.global_samples * divided_by
        self._sync.begin(weight, sync=self._is_last)

    def weigh(self, output: Any) -> None:
        """After the forward: take the weight that the step returned beside the loss, if any.

        Raises:
            DataError: if it is negative or not finite.
        """
        if not (isinstance(output, dict) and output.get("weight") is not None):
            return
        weight = float(output["weight"])
        if not 0 <= weight < float("inf"):
            raise DataError(f"training_step returned weight={weight}: it must be a finite number of at least 0")
        weight = 0.0 if self._micro.is_dummy else weight
        self._weight_sum += weight
        total = None
        if self._is_last:
            total = torch.tensor(self._weight_sum, dtype=torch.float64)
            self._weight_sum = 0.0
        self._sync.begin(weight * self._divided_by, sync=self._is_last, total=total)
