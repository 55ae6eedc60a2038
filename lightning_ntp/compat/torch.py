"""The private parts of torch that this package uses, each behind a check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

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


def version_of(tensor: Tensor) -> int:
    """How often a tensor's memory has been written to in place (not through ``.data``)."""
    return tensor._version


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module is the result of ``torch.compile``, or was compiled in place by ``module.compile()``."""
    return isinstance(module, torch._dynamo.OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None


@contextmanager
def total_norm_by(handler: Callable[[list[Tensor], float], Tensor | None]) -> Iterator[None]:
    """Inside, ``torch.nn.utils.clip_grad_norm_`` asks ``handler`` for the norm of the gradients first.

    The function sees local shards only, and its norm would be silently wrong. It looks the norm up in its module each time,
    so it is answered however the user imported it.

    Args:
        handler: Takes the gradients and the kind of norm; returns the norm, or ``None`` for gradients of others.

    Raises:
        UnsupportedError: if this torch computes the norm elsewhere.
    """
    from torch.nn.utils import clip_grad

    original = getattr(clip_grad, "_get_total_norm", None)
    if original is None:
        raise UnsupportedError(
            f"torch {torch.__version__} computes the gradient norm elsewhere; use a torch in the supported range"
        )

    def total_norm(tensors, norm_type=2.0, *args, **kwargs):
        grads = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        answer = handler(grads, float(norm_type))
        return original(grads, norm_type, *args, **kwargs) if answer is None else answer

    clip_grad._get_total_norm = total_norm
    try:
        yield
    finally:
        clip_grad._get_total_norm = original
