"""The private parts of torch's modules and parameters that this package reads, each behind a check."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lightning_ntp.errors import UnsupportedError


def has_hooks(module: nn.Module) -> bool:
    """Whether a forward or backward hook of the user's sits on a module."""
    return _any_of(module, ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"))


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether ``register_hook`` or ``register_post_accumulate_grad_hook`` was called on a parameter."""
    return _any_of(parameter, ("_backward_hooks", "_post_accumulate_grad_hooks"))


def _any_of(owner: Any, names: Iterable[str]) -> bool:
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise UnsupportedError(
            f"torch {torch.__version__} keeps hooks elsewhere than in {', '.join(missing)}: use a torch in the "
            "supported range"
        )
    return any(getattr(owner, name) for name in names)
