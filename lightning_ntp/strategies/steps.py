"""Runs the steps of a LightningModule: each pass counts by its samples, under random numbers of its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_ntp.compat import lightning as compat
from lightning_ntp.data import MicroBatch
from lightning_ntp.engine import Member, WindowWeights
from lightning_ntp.engine.plain import Plain
from lightning_ntp.engine.survivor import Survivor
from lightning_ntp.parallel.random import seed_replica
from lightning_ntp.strategies.loaders import ReplicaLoaders
from lightning_ntp.strategies.metrics import ReplicaReducer, leave_no_trace
from lightning_ntp.strategies.rollback import evaluation_snapshot

Step = Callable[..., Any]


class StepRunner:
    """Runs training, validation, test and prediction steps on this member.

    Random numbers are seeded before every step: equal on all slots of a replica, so that masks on replicated
    activations and sampled tokens are equal too, different between replicas and steps.

    Args:
        trainer: The Trainer.
        engine: Has this member, and runs evaluation steps as units.
        reducer: Counts logged values.
        loaders: Know the micro-batch in hand.
        seed: Of the run, the same on all members.

    Attributes:
        seed: As given; a joiner gets the others'.
    """

    def __init__(
        self,
        trainer: Trainer,
        engine: Plain | Survivor,
        reducer: ReplicaReducer,
        loaders: ReplicaLoaders,
        seed: int,
    ) -> None:
        self._trainer, self._engine, self._reducer, self._loaders = trainer, engine, reducer, loaders
        self.seed = seed
        self._weights: WindowWeights | None = None
        self._pass: tuple[int, int, bool] | None = None  # number, samples, whether it is the micro-batch's last

    @property
    def _member(self) -> Member:
        return self._engine.member

    def start_sync(self) -> None:
        """Once the member's gradient sync has been started, in every view anew."""
        self._weights = WindowWeights(self._member.sync)

    def train(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One pass of a training step."""
        assert self._weights is not None
        micro = self._loaders.current_training() if self._pass is None else self._loaders.train.current
        number, samples, is_last = self._pass or (0, micro.num_samples, True)
        is_automatic = self._trainer.lightning_module.automatic_optimization
        self._weights.begin(micro, samples, self._trainer.accumulate_grad_batches if is_automatic else 1, is_last)
        self._seed_step(micro.epoch, micro.window, micro.index, number)
        with self._counting(micro, samples):
            output = step(*args, **kwargs)
        if is_automatic:
            self._weights.weigh(output)
        return output

    def evaluate(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One validation, test or prediction step.

        Args:
            step: Lightning's.
            args: Batch, batch index if the step wants it, loader index if there are several.
            kwargs: Nothing so far.
        """
        batch_idx, loader_idx = (*args[1:], 0, 0)[:2]
        micro = self._loaders.current_evaluation(loader_idx)
        now = self._trainer.global_step
        is_inference, has_grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def run() -> Any:
            self._seed_step(now, loader_idx, batch_idx)
            counting = nullcontext() if micro is None else self._counting(micro, micro.num_samples)
            with torch.inference_mode(is_inference), torch.set_grad_enabled(has_grad), counting:
                return step(*args, **kwargs)

        return self._engine.evaluate(run, lambda: evaluation_snapshot(self._trainer))

    def with_extra_passes(self, run: Step) -> Step:
        """Run what ``max_micro_batch`` has split off before ``run``, which runs the last pass of a micro-batch."""

        def run_passes(optimizer: Any, batch_idx: int, kwargs: OrderedDict) -> Any:
            micro = self._loaders.train.current
            if micro is None or not micro.extra:  # a stream's first batch, or nothing to split
                return run(optimizer, batch_idx, kwargs)
            try:
                for number, (batch, samples) in enumerate(micro.extra):
                    self._pass = (number, samples, False)
                    self._run_extra_pass(batch, optimizer, batch_idx, kwargs)
                self._pass = (len(micro.extra), micro.last_samples, True)
                return run(optimizer, batch_idx, kwargs)
            finally:
                self._pass = None

        return run_passes

    def _run_extra_pass(self, batch: Any, optimizer: Any, batch_idx: int, kwargs: OrderedDict) -> None:
        moved = compat.batch_on_device(self._trainer, batch)
        progress = compat.zero_grad_progress(self._trainer)
        before = progress.state_dict()
        with self._member.sync.paused(), self._reducer.alone(), compat.logging_for(self._trainer, moved):
            compat.automatic_pass(self._trainer, optimizer, batch_idx, OrderedDict(kwargs, batch=moved))()
        progress.load_state_dict(before)

    def _seed_step(self, *parts: int) -> None:
        seed_replica(self._member.device, self.seed, *parts, self._member.number)

    @contextmanager
    def _counting(self, micro: MicroBatch, samples: int) -> Iterator[None]:
        """Let logged means count by samples; a dummy leaves nothing behind."""
        module = self._trainer.lightning_module
        untouched = leave_no_trace(self._trainer, module) if micro.is_dummy else nullcontext()
        with self._reducer.weighted_by(0 if micro.is_dummy else samples), untouched:
            yield
