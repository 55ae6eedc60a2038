"""The part of the strategy that stands inside the Trainer's loops: batches, steps, backward and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ntp.compat.torch import total_norm_by
from lightning_ntp.engine.plain import Plain
from lightning_ntp.engine.survivor import Survivor
from lightning_ntp.strategies import checks
from lightning_ntp.strategies.loaders import ReplicaLoaders
from lightning_ntp.strategies.recovery import TrainerRecovery
from lightning_ntp.strategies.steps import StepRunner
from lightning_ntp.strategies.votes import Votes


class StepHooks(ModelParallelStrategy):
    """What the loops call; the parts that do it are made in ``setup``."""

    _engine: Plain | Survivor | None = None
    _recovery: TrainerRecovery | None = None
    _loaders: ReplicaLoaders | None = None
    _steps: StepRunner | None = None
    _votes: Votes | None = None
    _is_first_backward: bool

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return checks.check_set_up(self._loaders, "loaders").wrap(dataloader)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with total_norm_by(self._votes.total_norm):
            return self._steps.train(super().training_step, args, kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._steps.evaluate(super().validation_step, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._steps.evaluate(super().test_step, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._steps.evaluate(super().predict_step, args, kwargs)

    @override
    def on_train_start(self) -> None:
        self._loaders.check_single()

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        self._engine.begin_phase("backward")
        if self._is_first_backward:
            self._is_first_backward = False
            checks.check_graph(closure_loss, self._engine.member.model)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        with self._engine.member.sync.paused():
            yield

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        windows = None if self._recovery is None else self._recovery.windows
        if windows is not None and windows.is_taken():
            return None
        results: list[Any] = []

        def closure_and_vote() -> Any:
            if not results:
                result = closure()
                self._votes.of(optimizer)
                results.append(result)  # after the vote: from here on the step is committed
            return results[0]

        while True:
            try:
                with total_norm_by(self._votes.total_norm):
                    output = super().optimizer_step(optimizer, closure_and_vote, model, **kwargs)
                break
            except RuntimeError as error:
                if not results or windows is None:
                    raise
                self._engine.leave_and_agree(error)  # a hook's collective failed; the step is taken nevertheless
        self._engine.applied_step()
        if windows is not None:
            windows.step_taken()
            self._recovery.step_taken()
            if self.lightning_module.automatic_optimization:
                self._engine.end_unit()  # a committed step is not taken twice
        return output
