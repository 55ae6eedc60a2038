"""The private parts of torch that this package uses, each behind a check."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_ntp.errors import UnsupportedError


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward pass that is under way is complete, before ``backward()`` returns.

    Raises:
        UnsupportedError: if this torch has no such hook.
    """
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if not hasattr(engine, "queue_callback"):
        raise UnsupportedError(
            f"torch {torch.__version__} has no autograd end-of-backward callback; use a torch in the supported range"
        )
    engine.queue_callback(callback)
