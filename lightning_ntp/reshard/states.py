"""Optimizer states by parameter: tensors of the parameter's shape, which move with it, and scalars, equal on all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ntp.errors import UnsupportedError
from lightning_ntp.parallel.model import ParallelParameter

Key = tuple[int, str]  # number of the optimizer, key of its state

PARAMETER: Key = (-1, "")  # the key of the parameter itself among its tensors


class OptimizerStates:
    """The states of some optimizers. Parameters may be added to them at any time: call ``refresh`` afterwards."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        self.refresh()

    def refresh(self) -> None:
        """Look up anew which optimizers own which parameter."""
        self._owners: dict[nn.Parameter, list[int]] = {}
        for number, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._owners.setdefault(parameter, []).append(number)

    def tensors(self, param: ParallelParameter) -> dict[Key, Tensor]:
        """The parameter and its states of the same shape, in the order in which they travel.

        Raises:
            UnsupportedError: if a state is neither of the parameter's shape nor a scalar.
        """
        found = {PARAMETER: param.parameter.data}
        for number in self._owners.get(param.parameter, ()):
            found.update({(number, key): value for key, value, moves in self.items(number, param) if moves})
        return dict(sorted(found.items()))

    def put(self, param: ParallelParameter, tensors: dict[Key, Tensor]) -> None:
        """Replace the parameter's data and its states of the same shape."""
        for key, tensor in tensors.items():
            if key == PARAMETER:
                param.parameter.data = tensor
            else:
                self.optimizers[key[0]].state[param.parameter][key[1]] = tensor

    def items(self, number: int, param: ParallelParameter) -> Iterator[tuple[str, Any, bool]]:
        """(key, value, whether it moves with the parameter) of what optimizer ``number`` keeps for a parameter.

        Raises:
            UnsupportedError: if a state is neither of the parameter's shape nor a scalar.
        """
        optimizer = self.optimizers[number]
        for key, value in optimizer.state.get(param.parameter, {}).items():
            moves = _is_like(value, param.parameter)
            if not isinstance(key, str) or not (moves or _is_scalar(value)):
                raise UnsupportedError(_misfit(optimizer, key, value, param))
            yield key, value, moves


def _is_like(value: Any, parameter: nn.Parameter) -> bool:
    """Whether a state lies on the slots as its parameter does; a parameter without dimensions has scalars only."""
    return _is_plain(value) and value.dim() > 0 and value.shape == parameter.shape


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Tensor) or (_is_plain(value) and value.numel() == 1 and not value.is_complex())


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided


def _misfit(optimizer: Optimizer, key: Any, value: Any, param: ParallelParameter) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return (
        f"optimizer {type(optimizer).__name__} keeps {key!r}, a {type(value).__name__}{shape}, for {param.name!r} of "
        f"shape {tuple(param.parameter.shape)}: only plain tensors of the parameter's shape and scalars can move "
        "between slots; use AdamW, Adam or SGD, or fault_tolerance=False"
    )
