"""A whole ``Trainer.fit`` in every rank of a zygote run, the same fit dense in this process, and the comparison."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ntp import NTPStrategy
from tests.dist.bare import RankRun, assert_copies_equal, history_of, plan_for
from tests.support.batches import TokenDataset, padded_batch
from tests.support.models import ModelConfig, build, loss_fn, padded_loss_fn
from tests.support.reference import History, assert_parity, make_optimizer, weights_of

Options = dict[str, Any]

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}  # docs/design.md
SMALL = ModelConfig(num_kv_heads=2, layers=1)


def is_ntp(trainer: Trainer) -> bool:
    return isinstance(trainer.strategy, NTPStrategy)


@dataclass
class Seen:
    """One pass through ``training_step``.

    Attributes:
        step: (epoch, window).
        ids: The samples; none for a dummy.
        loss: Their mean loss.
        weight: What it counts: samples or tokens; 0 for a dummy.
    """

    step: tuple[int, int]
    ids: list[int]
    loss: float
    weight: float


class Language(LightningModule):
    """The test transformer as users write it; batches are (sample ids, tokens).

    Args:
        config: Of the transformer.
        seed: Of the initial weights.
        optimizer: ``"adamw"`` or ``"sgd"``.
        padded: Return the mean over valid tokens with their number as ``weight``.
        poisoned: Give a loss of NaN in a dummy.
    """

    def __init__(
        self,
        config: ModelConfig,
        seed: int = 0,
        optimizer: str = "adamw",
        padded: bool = False,
        poisoned: bool = False,
    ) -> None:
        super().__init__()
        self.model = build(config, seed, torch.get_default_dtype())
        self.optimizer_name, self.padded, self.poisoned = optimizer, padded, poisoned
        self.seen: list[Seen] = []
        self.notes: Any = None  # for subclasses; a rank reports it
        self.ntp_plan = plan_for(config).with_prefix("model")

    def losses(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
        """Loss and what it counts."""
        ids, tokens = batch
        if self.padded:
            tokens, labels = padded_batch(ids.tolist())
            return padded_loss_fn(self.model(tokens), labels)
        return loss_fn(self.model(tokens), tokens), len(ids)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss, weight = self.losses(batch)
        loss = self.note(batch, batch_idx, loss, weight)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return {"loss": loss, "weight": weight} if self.padded else loss

    def note(self, batch: tuple[Tensor, Tensor], batch_idx: int, loss: Tensor, weight: float) -> Tensor:
        """Record the pass; returns the loss, poisoned if that was asked for."""
        micro = self.micro_batch()
        if micro is None:
            self.seen.append(Seen((self.current_epoch, batch_idx), batch[0].tolist(), loss.item(), weight))
            return loss
        step = micro.epoch, micro.window
        if not micro.is_dummy:
            self.seen.append(Seen(step, batch[0].tolist(), loss.item(), weight))
            return loss
        self.seen.append(Seen(step, [], 0.0, 0.0))
        return loss * math.nan if self.poisoned else loss

    def micro_batch(self) -> Any:
        """What the strategy knows of the micro-batch; None in a dense run."""
        return self.trainer.strategy._loaders.train.current if is_ntp(self.trainer) else None

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        _, tokens = batch
        self.log("val_loss", loss_fn(self.model(tokens), tokens), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return make_optimizer(self.optimizer_name, self.parameters())


class StepRecorder(Callback):
    """This member's parameters after every step, and the norms of the gradient before clipping."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.norms: list[float] = []
        self._steps_seen = 0

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        if is_ntp(trainer):
            self.norms.append(trainer.strategy._votes.of(optimizer).grad_norm)
        else:
            grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self.norms.append(float(torch.nn.utils.get_total_norm(grads)))

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if trainer.global_step > self._steps_seen or not module.automatic_optimization:
            self._steps_seen = trainer.global_step
            self.weights.append(weights_of(module.model))


def loader(size: int, batch_size: int, **options: Any) -> DataLoader:
    return DataLoader(TokenDataset(size, with_index=True), batch_size=batch_size, **options)


@dataclass(frozen=True)
class Scenario:
    """One training, to be run on unequal replicas and dense.

    Attributes:
        module: Class of the LightningModule.
        degrees: Of the replicas.
        size: Samples of an epoch.
        batch_size: Samples of a replica's micro-batch, if the replicas were equal.
        accumulate: Micro-batches of a window.
        shares: By hand, if given.
        max_micro_batch: Passed on.
        global_batch: Samples of a full window, if they are not batch_size x replicas x accumulate.
        trainer: More arguments of both Trainers.
        options: More arguments of the module.
        strategy: More arguments of the strategy.
        config: Of the transformer.
        data: Makes the loaders, from size and batch size.
        norms: Whether each step's voted norm is that of the dense gradient.
        dtype: Of both runs' models; the comparison is as exact as it allows.
    """

    module: type[Language] = Language
    degrees: tuple[int, ...] = (2, 1)
    size: int = 26
    batch_size: int = 4
    accumulate: int = 1
    global_batch: int | None = None
    trainer: Options = field(default_factory=dict)
    options: Options = field(default_factory=dict)
    strategy: Options = field(default_factory=dict)
    config: ModelConfig = SMALL
    data: Callable[[int, int], DataLoader] = loader
    norms: bool = True
    dtype: torch.dtype = torch.float64

    @property
    def samples_per_step(self) -> int:
        return self.global_batch or self.batch_size * len(self.degrees) * self.accumulate


    def samples_in(self, step: int) -> int:
        """Samples of a step, where every epoch takes them in full windows but for its last."""
        windows = math.ceil(self.size / self.samples_per_step)
        return min(self.samples_per_step, self.size - step % windows * self.samples_per_step)


@dataclass
class FitResult:
    """What one rank saw."""

    seen: list[Seen]
    run: RankRun
    metrics: dict[str, float]
    global_step: int
    shares: tuple[int, ...]
    notes: Any = None


def quiet_trainer(world_size: int, strategy: Any, **options: Any) -> Trainer:
    defaults: Options = {
        "accelerator": "cpu",
        "devices": world_size,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    warnings.filterwarnings("ignore")
    return Trainer(strategy=strategy, **(defaults | options))


def fit_rank(rank: int, world_size: int, store: str, scenario: Scenario) -> FitResult:
    """One member's fit. Only the leader's initial weights count."""
    torch.set_default_dtype(scenario.dtype)
    module = scenario.module(scenario.config, seed=rank, **scenario.options)
    recorder = StepRecorder()
    strategy = NTPStrategy(degrees=list(scenario.degrees), bucket_cap_mb=0.02, **scenario.strategy)
    options = {"accumulate_grad_batches": scenario.accumulate} if scenario.accumulate > 1 else {}
    trainer = quiet_trainer(world_size, strategy, callbacks=[recorder], **options, **scenario.trainer)
    trainer.fit(module, scenario.data(scenario.size, scenario.batch_size), scenario.data(7, 2))
    return FitResult(
        module.seen,
        rank_run(strategy, module, recorder, rank),
        {name: float(value) for name, value in trainer.callback_metrics.items()},
        trainer.global_step,
        strategy.shares,
        module.notes,
    )


def rank_run(strategy: NTPStrategy, module: Language, recorder: StepRecorder, rank: int) -> RankRun:
    """What the comparison of bare runs takes, from a fit that has ended."""
    params = {p.name.removeprefix("model."): p for p in module._ntp_model.parameters()}
    layouts = {name: param.layout for name, param in params.items()}
    shapes = {name: param.dense_shape for name, param in params.items()}
    replica, slot = strategy.topology.place(rank)
    return RankRun(replica, slot, [], recorder.norms, recorder.weights, layouts, shapes, [])


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """For training in the process of the tests themselves, where the zygote is forked from."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def fit_dense(scenario: Scenario, data: DataLoader | None = None) -> tuple[History, dict[str, float], Any]:
    """The same training without any parallelism: Lightning's own loop over whole global batches, here.

    Args:
        scenario: What to train.
        data: Global batches instead of the scenario's own.

    Returns:
        The history, the last logged values, the module.
    """
    with default_dtype(scenario.dtype):
        module = scenario.module(scenario.config, seed=0, **scenario.options)
        recorder = StepRecorder()
        trainer = quiet_trainer(1, "auto", callbacks=[recorder], **scenario.trainer)
        batches = data or scenario.data(scenario.size, scenario.samples_per_step)
        trainer.fit(module, batches, scenario.data(7, 4))
    history = History([seen.loss for seen in module.seen], list(recorder.norms), recorder.weights)
    return history, {name: float(value) for name, value in trainer.callback_metrics.items()}, module


def step_losses(results: Sequence[FitResult]) -> list[float]:
    """Each step's loss over its global batch, from what all replicas saw."""
    firsts = [result for result in results if result.run.slot == 0]
    seen = sorted(itertools.chain(*(result.seen for result in firsts)), key=lambda entry: entry.step)
    losses = []
    for _, entries in itertools.groupby(seen, key=lambda entry: entry.step):
        counted = [(entry.weight, entry.loss) for entry in entries]
        losses.append(sum(weight * loss for weight, loss in counted) / sum(weight for weight, _ in counted))
    return losses


def history_from(results: Sequence[FitResult], replica: int = 0) -> History:
    """As the dense reference reports it, with the weights of one replica put together."""
    runs = [result.run for result in results]
    for run in runs:
        run.losses = [0.0] * len(run.weights)
        run.norms = run.norms if len(run.norms) == len(run.weights) else [0.0] * len(run.weights)
    history = history_of(runs, replica)
    history.losses = step_losses(results)
    return history


def ids_by_step(result: FitResult) -> list[list[int]]:
    """The samples of each step that this rank saw."""
    groups = itertools.groupby(result.seen, key=lambda entry: entry.step)
    return [list(itertools.chain(*(entry.ids for entry in entries))) for _, entries in groups]


def check_parity(workers: Any, scenario: Scenario, dense: History | None = None) -> list[FitResult]:
    """Run ``scenario`` both ways and compare every step, on every replica; copies must be bitwise equal (A3)."""
    __tracebackhide__ = True
    results = workers.run(fit_rank, sum(scenario.degrees), scenario)
    dense = dense or fit_dense(scenario)[0]
    if not scenario.norms:
        dense.norms = [None] * len(dense.losses)
    for replica in range(len(scenario.degrees)):
        assert_parity(history_from(results, replica), dense, TOLERANCES[scenario.dtype])
    runs = [result.run for result in results]
    assert_copies_equal(runs)
    for result in results:
        first = next(other for other in results if other.run.replica == result.run.replica)
        assert ids_by_step(result) == ids_by_step(first), "slots of a replica see the same batches"
    return results
