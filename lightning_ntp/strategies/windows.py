"""Runs each window of training until it is committed.

Under automatic optimization the unit of replay is the window: the micro-batches of one optimizer step. Under manual
optimization it is one ``training_step``; optimizer steps that it has committed already are left out when it is run
again, so with several of them in one ``training_step`` the second run sees later weights in its first part.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_ntp.compat import lightning as compat
from lightning_ntp.engine.survivor import Replay, Survivor
from lightning_ntp.errors import UnsupportedError
from lightning_ntp.strategies.loaders import ReplicaLoaders
from lightning_ntp.strategies.rollback import StepSnapshot
from lightning_ntp.strategies.steps import StepRunner

Run = Callable[..., Any]


class WindowReplay:
    """Wraps the loops' methods that run a micro-batch.

    Args:
        trainer: The Trainer, fitting.
        engine: Recovers.
        loaders: Draw a window's micro-batches again.
        steps: Run single passes.

    Attributes:
        is_replaying: Whether what runs now has been run before.
        before_first: Called once, before the first window.
        before_window: Called before each window, on all members alike.
    """

    def __init__(self, trainer: Trainer, engine: Survivor, loaders: ReplicaLoaders, steps: StepRunner) -> None:
        self._trainer, self._engine, self._loaders, self._steps = trainer, engine, loaders, steps
        self._snapshot: StepSnapshot | None = None
        self._kept: list[OrderedDict] = []
        self._is_stale = False
        self._steps_taken = self._steps_seen = 0
        self._syncs_at_step, self._is_accumulating = 0, False
        self.is_replaying = False
        self.before_first: Callable[[], None] = _nothing
        self.before_window: Callable[[], None] = _nothing

    def view_changed(self) -> None:
        """The batch in hand was drawn, and perhaps run in part, under another view."""
        self._is_stale = True
        self._syncs_at_step = 0  # the new view's sync begins to count

    # Automatic optimization

    def around_automatic(self, run: Run) -> Run:
        """Wraps ``run(optimizer, batch_idx, kwargs)`` of one micro-batch."""
        inner = self._steps.with_extra_passes(run)

        def run_micro_batch(optimizer: Any, batch_idx: int, kwargs: OrderedDict) -> Any:
            self._open(kwargs)

            def attempt() -> Any:
                if not self._is_stale:
                    return inner(optimizer, batch_idx, kwargs)
                drawn = self._catch_up(optimizer, batch_idx)
                with compat.logging_for(self._trainer, drawn.get("batch")):
                    return inner(optimizer, batch_idx, drawn)

            return self._until_done(attempt)

        return run_micro_batch

    def _catch_up(self, optimizer: Any, batch_idx: int) -> OrderedDict:
        """Run the window's earlier micro-batches again; returns the arguments of the one in hand."""
        self._snapshot.restore()
        accumulate = self._steps.with_extra_passes(self._accumulate)
        number = len(self._kept) - 1
        drawn = self._loaders.draw_again(self._kept)
        for back in range(number, 0, -1):
            kwargs = next(drawn)
            accumulate(optimizer, batch_idx - back, kwargs)
        kwargs = next(drawn)
        self._is_stale = False
        return kwargs

    def _accumulate(self, optimizer: Any, batch_idx: int, kwargs: OrderedDict) -> None:
        with self._engine.member.sync.paused(), compat.logging_for(self._trainer, kwargs.get("batch")):
            compat.automatic_pass(self._trainer, optimizer, batch_idx, kwargs)()

    # Manual optimization

    def around_manual(self, run: Run) -> Run:
        """Wraps ``run(kwargs)`` of one ``training_step``."""

        def run_step(kwargs: OrderedDict) -> Any:
            self._open(kwargs)
            self._check_no_gradients()

            def attempt() -> Any:
                self._steps_seen = 0
                if not self._is_stale:
                    return self._manual(run, kwargs)
                self._snapshot.restore()
                drawn = next(self._loaders.draw_again(self._kept[-1:]))
                self._is_stale = False
                for parameter in self._trainer.lightning_module.parameters():
                    parameter.grad = None
                with compat.logging_for(self._trainer, drawn.get("batch")):
                    return self._manual(run, drawn)

            return self._until_done(attempt)

        return run_step

    def _manual(self, run: Run, kwargs: OrderedDict) -> Any:
        syncs = self._engine.member.sync.num_syncs
        self._is_accumulating = False
        result = run(kwargs)
        self._is_accumulating = self._engine.member.sync.num_syncs > max(syncs, self._syncs_at_step)
        return result

    def is_taken(self) -> bool:
        """Whether the optimizer step that is asked for now was committed in an earlier run of this unit."""
        self._steps_seen += 1
        return self._steps_seen <= self._steps_taken

    def step_taken(self) -> None:
        self._steps_taken += 1
        self._syncs_at_step = self._engine.member.sync.num_syncs

    # Both

    def _open(self, kwargs: OrderedDict) -> None:
        micro = self._loaders.in_hand()
        if micro.index == 0 or not self._kept:
            self._engine.enter_step()
            self.before_window()
            self.before_first()
            self.before_first = _nothing
            self._kept = []
            self._snapshot = StepSnapshot(self._trainer)
        self._steps_seen = self._steps_taken = 0
        self._kept.append(OrderedDict(kwargs, batch=None))  # it is drawn again

    def _until_done(self, attempt: Callable[[], Any]) -> Any:
        try:
            while True:
                self._engine.enter_run()
                try:
                    with self._engine.unit(), self._snapshot.passing():
                        self._engine.begin_step()
                        result = attempt()
                    if not self._is_committed:
                        self._engine.check_swallowed()
                    return result
                except Replay:
                    pass
                except torch.OutOfMemoryError as error:
                    self._engine.leave_out_of_memory(error, self._loaders.can_split)
                except RuntimeError as error:
                    # It must be gone before anything changes shape: its frames hold the graph of the failed pass.
                    self._engine.leave_and_agree(error)
                    if self._is_committed:
                        raise UnsupportedError(
                            "a collective of the user's own failed behind the optimizer's step, in optimizer_step or "
                            "training_step: the step is committed and is not run again; use the strategy's reduce, "
                            "all_gather and broadcast, which go on after a death"
                        ) from None
                self.is_replaying = True
        finally:
            self.is_replaying = False

    @property
    def _is_committed(self) -> bool:
        """Whether the unit's step is taken, and the unit over, but for what comes behind the step."""
        return self._steps_taken > 0 and self._trainer.lightning_module.automatic_optimization

    def _check_no_gradients(self) -> None:
        if self._is_stale and self._is_accumulating:
            raise UnsupportedError(
                "a member was lost between two training_steps whose gradients are accumulated by hand: only one "
                "training_step can be run again; take the optimizer's step in the training_step that has the backward, "
                "or use automatic optimization with accumulate_grad_batches"
            )


def _nothing() -> None:
    pass
