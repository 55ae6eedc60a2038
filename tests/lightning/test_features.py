"""What users do around the steps: precision, evaluation, logging, dropout, fine-tuning, streams, limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.plugins.precision import DoublePrecision
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_ntp import NTPStrategy
from tests.lightning.runs import (
    SMALL,
    Language,
    Scenario,
    check_parity,
    fit_dense,
    fit_rank,
    is_ntp,
    loader,
    quiet_trainer,
)
from tests.lightning.test_loops import stream
from tests.support.models import ModelConfig, build, loss_fn
from tests.support.reference import train_dense

# Precision


class Clipped(Language):
    """Notes the norm of every step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.notes = [*(self.notes or ()), float(clip_grad_norm_(self.parameters(), 1.0))]


def fit_precisions(rank: int, world_size: int, store: str, runs: list[tuple[Any, str, dict]]) -> list[Any]:
    results = []
    for degrees, kind, options in runs:
        strategy = NTPStrategy(degrees=degrees) if degrees else "ntp"
        plugins = [DoublePrecision()] if kind == "plugin" else None
        module = Clipped(SMALL, seed=rank)
        trainer = quiet_trainer(world_size, strategy, plugins=plugins, **options)
        trainer.fit(module, loader(18, 3 if degrees else 6))
        dtype = next(module.parameters()).dtype
        results.append(([(entry.weight, entry.loss) for entry in module.seen], str(dtype), module.notes))
    return results


def test_precision(workers):
    runs = [
        ([2, 1], "fp32", {"precision": "32-true"}),
        ([2, 1], "bf16-mixed", {"precision": "bf16-mixed"}),
        ([2, 1], "bf16-true", {"precision": "bf16-true"}),
        ([2, 1], "plugin", {}),
        (None, "string", {"precision": "64-true"}),
    ]
    tolerances = {"fp32": 1e-5, "bf16-mixed": 2e-2, "bf16-true": 2e-2, "plugin": 1e-6, "string": 1e-6}
    dtypes = {"bf16-true": "torch.bfloat16", "plugin": "torch.float64", "string": "torch.float64"}
    dense = train_dense(SMALL, [list(range(start, start + 6)) for start in (0, 6, 12)])
    first, _, last = workers.run(fit_precisions, 3, runs)
    for number, (degrees, kind, _) in enumerate(runs):
        parts = [first[number][0]] + ([last[number][0]] if degrees else [])
        for step, loss in enumerate(dense.losses):
            counted = [part[step] for part in parts]
            ours = sum(weight * value for weight, value in counted) / sum(weight for weight, _ in counted)
            assert ours == pytest.approx(loss, rel=tolerances[kind]), (kind, step)
        assert first[number][1] == dtypes.get(kind, "torch.float32"), kind
        assert first[number][2] == last[number][2] == pytest.approx(dense.norms, rel=tolerances[kind]), kind


def test_float32_parity(workers):
    """Every weight after every step, and the norms, to 1e-5. SGD: AdamW's first steps go by the sign of a gradient."""
    check_parity(
        workers,
        Scenario(
            degrees=(4, 3), size=80, accumulate=3, options={"optimizer": "sgd"}, dtype=torch.float32,
            trainer={"gradient_clip_val": 1.0, "max_epochs": 3}, config=ModelConfig(num_kv_heads=2, tied=True),
        ),
    )  # fmt: skip


# Evaluation


class Evaluated(Language):
    """Two validation loaders; notes the samples of every stage."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.notes = {"ids": []}
        self.accuracy = MulticlassAccuracy(101, average="micro")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.evaluate(batch)
        self.log("val", loss, sync_dist=True)

    def test_step(self, batch: Any) -> None:
        loss = self.evaluate(batch)
        logits = self.model(batch[1])[:, :-1].flatten(0, 1)
        self.accuracy(logits, batch[1][:, 1:].flatten())
        self.log_dict({"test": loss, "accuracy": self.accuracy}, sync_dist=True, on_epoch=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0].tolist(), self.model(batch[1])[:, -1]

    def evaluate(self, batch: Any) -> Tensor:
        ids = batch[0].tolist()
        is_dummy = is_ntp(self.trainer) and self.trainer.strategy._reducer._samples == 0
        self.notes["ids"].append([] if is_dummy else ids)
        loss = loss_fn(self.model(batch[1]), batch[1])
        return loss * torch.nan if is_dummy else loss


def evaluate_all(trainer: Trainer, module: Language, batch_size: int) -> dict[str, Any]:
    told: dict[str, Any] = {}
    runs = {
        "val": lambda: trainer.validate(module, [loader(7, batch_size), loader(5, batch_size)], verbose=False),
        "test": lambda: trainer.test(module, loader(9, batch_size, num_workers=1), verbose=False),
        "stream": lambda: trainer.test(module, stream(9, 1), verbose=False),
        "predict": lambda: trainer.predict(module, loader(5, batch_size)),
    }
    for name, run in runs.items():
        module.notes["ids"] = []
        told[name] = run(), module.notes["ids"]
    return told


def evaluate_rank(rank: int, world_size: int, store: str) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    module = Evaluated(SMALL, seed=rank)
    return evaluate_all(quiet_trainer(world_size, NTPStrategy(degrees=[2, 1])), module, 2)


def test_evaluation(workers):
    results = workers.run(evaluate_rank, 3)
    torch.set_default_dtype(torch.float64)
    dense = evaluate_all(quiet_trainer(1, "auto"), Evaluated(SMALL), 4)
    for stage, counts in (("val", (7, 5)), ("test", (9,)), ("stream", (9,))):
        for told in results:
            for ours, theirs in zip(told[stage][0], dense[stage][0], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-6 if stage == "stream" else 1e-12), stage
        assert results[0][stage][1] == results[1][stage][1]
        seen = sorted(sum(results[0][stage][1] + results[2][stage][1], []))
        assert seen == sorted(sum(map(list, map(range, counts)), [])), "every sample once"
    predicted = [batch for told in (results[0], results[2]) for batch in told["predict"][0]]
    logits = torch.cat([values for _, values in dense["predict"][0]])
    assert sorted(sum((ids for ids, _ in predicted), [])) == list(range(5))
    for ids, values in predicted:
        torch.testing.assert_close(values, logits[ids], rtol=1e-11, atol=1e-11)


# Logging


class Logging(Language):
    """Logs a value of every sample in all ways."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.notes = []
        self.mean, self.total = MeanMetric(), SumMetric()
        self.accuracy = MulticlassAccuracy(101, average="micro")

    def log_all(self, ids: Tensor, tokens: Tensor, logits: Tensor, poison: float) -> None:
        value = (ids * 3.7).sin() * poison
        reductions = {"mean": value.mean(), "sum": value.sum(), "min": value.min(), "max": value.max()}
        for name, reduced in reductions.items():
            self.log(name, reduced, on_step=True, on_epoch=True, sync_dist=True, reduce_fx=name)
            self.log(f"only_step_{name}", reduced, on_step=True, on_epoch=False, sync_dist=True, reduce_fx=name)
        self.log("count", len(ids), on_epoch=True, on_step=False, sync_dist=True, reduce_fx="sum")
        self.mean(value)
        self.total(value)
        self.accuracy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        metrics = {"metric_mean": self.mean, "metric_total": self.total, "accuracy": self.accuracy}
        self.log_dict(metrics, on_step=False, on_epoch=True)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        ids, tokens = batch
        logits = self.model(tokens)
        loss = loss_fn(logits, tokens)
        self.note(batch, batch_idx, loss, len(ids))
        self.log_all(ids, tokens, logits, 1.0 if self.seen[-1].ids else torch.nan)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        pass

    def on_train_batch_end(self, *args: Any) -> None:
        keys = [f"{name}_step" for name in ("mean", "sum", "min", "max")]
        keys += [f"only_step_{name}" for name in ("mean", "sum", "min", "max")]
        self.notes.append([float(self.trainer.callback_metrics[key]) for key in keys])

    def on_train_epoch_end(self) -> None:
        if is_ntp(self.trainer):
            gathered = self.all_gather(torch.tensor([float(self.trainer.strategy.member.replica)]))
            assert gathered.tolist() == [[0.0], [1.0]], f"one row a replica, not {gathered}"
            self.mean.clone()


@pytest.mark.parametrize("size", [25, 27])
def test_logged_values(workers, size):
    """Unequal shares; with 25 samples the second replica has a dummy at the end, whose values are NaN."""
    scenario = Scenario(module=Logging, size=size, strategy={"shares": [5, 3]}, trainer={"max_epochs": 2})
    results = workers.run(fit_rank, 3, scenario)
    _, metrics, module = fit_dense(scenario)
    assert any(not entry.ids for entry in results[2].seen) == (size == 25)
    for result in results:
        for ours, theirs in zip(result.notes, module.notes, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-12)
        assert result.metrics == pytest.approx(metrics, rel=1e-12)


# Random numbers


class Noisy(LightningModule):
    """Dropout on a slot's own columns and on a replicated activation."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(101, 16)
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.inner, self.outer = nn.Dropout(0.3), nn.Dropout(0.3)
        self.head = nn.Linear(16, 101)
        self.ntp_plan = {"embed": "vocab", "up": "colwise", "down": "rowwise", "head": "colwise(gather_output=True)"}
        self.masks: list[list[float]] = []
        self.losses: list[float] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(self.outer(x + self.down(self.inner(self.up(x).relu()))))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.masks.append(F.dropout(torch.ones(64)).tolist())
        loss = loss_fn(self(batch[1]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.masks.append(torch.rand(8).tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit_noisy(rank: int, world_size: int, store: str, seeds: list[int | None]) -> list[Any]:
    told = []
    for seed in seeds:
        if seed is None:
            torch.manual_seed(rank)
        else:
            seed_everything(seed, workers=True, verbose=False)
        module = Noisy(seed or rank)
        data = loader(30, 3, shuffle=True, num_workers=2)
        trainer = quiet_trainer(world_size, NTPStrategy(degrees=[2, 2]), accumulate_grad_batches=2)
        trainer.fit(module, data, loader(7, 2))
        told.append((module.masks, module.losses, module.down.bias.detach().clone()))
    return told


def test_random_numbers(workers):
    r0s0, r0s1, r1s0, _ = workers.run(fit_noisy, 4, [None, 5, 5, 6])
    for run in range(4):
        (masks, losses, bias), (same_masks, same_losses, same_bias) = r0s0[run], r0s1[run]
        other_masks, _, other_bias = r1s0[run]
        assert masks == same_masks and losses == same_losses, "slots of a replica draw and see the same"
        assert len({str(mask) for mask in masks + other_masks}) == len(masks) * 2, "replicas and steps draw their own"
        assert all(value == value for value in losses)
        assert torch.equal(bias, same_bias) and torch.equal(bias, other_bias), "copies stay bitwise equal"
    assert r0s0[1][:2] == r0s0[2][:2], "a seed fixes the run"
    assert r0s0[1][1] != r0s0[3][1]


# Modules that change


class Checkpointed(Language):
    """Activation checkpointing of every layer."""

    def losses(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
        ids, tokens = batch
        x = self.model.embed(tokens)
        for layer in self.model.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return loss_fn(self.model.lm_head(self.model.norm(x)), tokens), len(ids)


class Unfreezing(BaseFinetuning):
    def freeze_before_training(self, module: Language) -> None:
        self.freeze([module.model.layers, module.model.embed], train_bn=False)

    def finetune_function(self, module: Language, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.model.layers, optimizer, lr=1e-3)


class Finetuned(Language):
    """The embedding stays frozen; the layers join in the second epoch, and one has a parameter that nothing uses."""

    def configure_callbacks(self) -> list[Any]:
        return [Unfreezing()]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.1)

    def on_train_batch_end(self, *args: Any) -> None:
        assert self.model.embed.weight.grad is None and self.model.unused.weight.grad is None


class FrozenLate(Language):
    """Freezes between forward and backward, in every second step."""

    def on_before_backward(self, loss: Tensor) -> None:
        self.model.layers.requires_grad_(self.global_step % 2 == 0)

    def on_train_batch_end(self, *args: Any) -> None:
        self.model.layers.requires_grad_(True)


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(Scenario(module=FrozenLate, accumulate=2, size=60), id="frozen-late"),
        pytest.param(Scenario(module=Checkpointed, config=ModelConfig(num_kv_heads=2)), id="checkpointing"),
        pytest.param(
            Scenario(
                module=Finetuned, config=ModelConfig(num_kv_heads=2, layers=1, unused=True),
                trainer={"max_epochs": 3}, accumulate=2,
            ),
            id="finetuning",
        ),
        pytest.param(Scenario(degrees=(2, 2, 1), size=40, trainer={"gradient_clip_val": 1.0}), id="three-replicas"),
    ],
)  # fmt: skip
def test_modules_that_change(workers, scenario):
    check_parity(workers, scenario)


def test_the_initial_weights_are_the_leaders():
    assert not torch.equal(build(SMALL, 0).embed.weight, build(SMALL, 1).embed.weight), "else the runs above show less"
