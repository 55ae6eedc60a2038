"""Runs the steps of a LightningModule: each pass counts by its samples, under random numbers of its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning.pytorch import Trainer

from lightning_ntp.compat import lightning as compat
from lightning_ntp.data import MicroBatch
from lightning_ntp.engine import Member, WindowWeights
from lightning_ntp.parallel.random import seed_replica
from lightning_ntp.strategies.loaders import ReplicaLoaders
from lightning_ntp.strategies.metrics import ReplicaReducer, leave_no_trace

Step = Callable[..., Any]


class StepRunner:
    """Runs training, validation, test and prediction steps on this member.

    Random numbers are seeded before every step: equal on all slots of a replica, so that masks on replicated
    activations and sampled tokens are equal too, different between replicas and steps.

    Args:
        trainer: The Trainer.
        member: This member.
        reducer: Counts logged values.
        loaders: Know the micro-batch in hand.
        seed: Of the run, the same on all members.
    """

    def __init__(
        self, trainer: Trainer, member: Member, reducer: ReplicaReducer, loaders: ReplicaLoaders, seed: int
    ) -> None:
        self._trainer, self._member, self._reducer, self._loaders = trainer, member, reducer, loaders
        self._seed = seed
        self._weights: WindowWeights | None = None
        self._pass: tuple[int, int, bool] | None = None  # number, samples, whether it is the micro-batch's last

    def start_fit(self) -> None:
        """Once the member's gradient sync has been started."""
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
        self._seed_step(self._trainer.global_step, loader_idx, batch_idx)
        micro = self._loaders.current_evaluation(loader_idx)
        with nullcontext() if micro is None else self._counting(micro, micro.num_samples):
            return step(*args, **kwargs)

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
        seed_replica(self._member.device, self._seed, *parts, self._member.replica)

    @contextmanager
    def _counting(self, micro: MicroBatch, samples: int) -> Iterator[None]:
        """Let logged means count by samples; a dummy leaves nothing behind."""
        module = self._trainer.lightning_module
        untouched = leave_no_trace(self._trainer, module) if micro.is_dummy else nullcontext()
        with self._reducer.weighted_by(0 if micro.is_dummy else samples), untouched:
            yield
