"""Checkpoint files with dense names, as the Trainer asks the strategy for them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ntp.checkpoint import (
    gather_model_state,
    gather_optimizer_state,
    load_model_state,
    load_optimizer_state,
    put_positions_back,
    read_file,
    save_file,
    set_positions_apart,
)
from lightning_ntp.engine.plain import Plain
from lightning_ntp.engine.survivor import Survivor
from lightning_ntp.errors import CheckpointError, UnsupportedError
from lightning_ntp.strategies.dowry import MARK as _DOWRY
from lightning_ntp.strategies.votes import unwrapped


class DenseFiles(ModelParallelStrategy):
    """The part of the strategy that saves and loads: one dense file, from any degrees and to any others."""

    _engine: Plain | Survivor
    _gathers = True

    @contextmanager
    def keeping_states_here(self) -> Iterator[None]:
        """Inside, the states of model and optimizers that the Trainer asks for are empty."""
        self._gathers = False
        try:
            yield
        finally:
            self._gathers = True

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._engine.is_alone or not self._gathers:
            return {}

        def gather() -> dict[str, Any]:
            member = self._engine.member
            return gather_model_state(member.model, member.topology, member.rank)

        return self._engine.outside(gather)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._engine.is_alone or not self._gathers:
            return {}

        def gather() -> dict[str, Any]:
            member = self._engine.member
            return gather_optimizer_state(member.model, unwrapped(optimizer), member.topology, member.rank)

        return self._engine.outside(gather)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        if storage_options is not None:
            raise UnsupportedError(f"storage_options={storage_options!r} is not supported: a plain file is written")
        if self._engine.is_alone:
            return  # a joiner on its way in: the others have what it would save
        path = self.broadcast(os.fspath(filepath))  # a string: a URL is no Path
        failure = None
        if self.is_global_zero:
            set_positions_apart(checkpoint)
            try:
                save_file(checkpoint, path)
            except CheckpointError as error:
                failure = str(error)
        failure = self.broadcast(failure)  # nobody goes on as if it had been written
        if failure is not None:
            raise CheckpointError(failure)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        checkpoint = read_file(self.broadcast(os.fspath(checkpoint_path)), weights_only)
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            put_positions_back(checkpoint)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if _DOWRY in checkpoint:
            return  # its weights came with the view
        load_model_state(self._engine.member.model, checkpoint["state_dict"], strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if _DOWRY in checkpoint:
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_optimizer_state(self._engine.member.model, optimizer, state)
