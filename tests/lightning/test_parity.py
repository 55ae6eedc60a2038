"""fp64 parity of ``Trainer.fit`` with dense training, step by step: all that users do up to the optimizer step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from tests.lightning.runs import Language, Scenario, check_parity, fit_dense, ids_by_step
from tests.support.models import ModelConfig
from tests.support.reference import make_optimizer, train_dense


def test_two_unequal_replicas(workers):
    """Accumulation, clipping, a partial last window, validation: against the reference without Lightning."""
    config = ModelConfig(num_kv_heads=2, unused=True)
    scenario = Scenario(
        degrees=(4, 3),
        size=50,
        batch_size=3,
        accumulate=3,
        trainer={"gradient_clip_val": 1.0, "max_epochs": 2},
        config=config,
    )
    windows = [list(range(start, min(start + 18, 50))) for start in (0, 18, 36)]
    results = check_parity(workers, scenario, train_dense(config, windows * 2))
    first, second = ids_by_step(results[0]), ids_by_step(results[4])
    assert [a + b for a, b in zip(first, second, strict=True)] == windows * 2
    assert results[0].shares == (10, 8) and results[0].global_step == 6
    _, metrics, _ = fit_dense(scenario)
    for name in ("val_loss", "train_loss_epoch"):
        assert results[5].metrics[name] == pytest.approx(metrics[name], rel=1e-12)


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(
            Scenario(accumulate=2, strategy={"shares": [5, 11]}, trainer={"gradient_clip_val": 1.0}), id="shares"
        ),
        pytest.param(
            Scenario(
                degrees=(2, 1), batch_size=6, global_batch=9, strategy={"global_batch": "shrink"}, size=30
            ),
            id="shrink",
        ),
        pytest.param(
            Scenario(accumulate=3, options={"padded": True}, trainer={"gradient_clip_val": 1.0}), id="tokens"
        ),
        pytest.param(
            Scenario(batch_size=5, strategy={"shares": [7, 3], "max_micro_batch": 2}, size=33), id="max-micro-batch"
        ),
        pytest.param(
            Scenario(
                accumulate=2, batch_size=5, strategy={"shares": [14, 6], "max_micro_batch": 3}, size=33,
                options={"padded": True},
            ),
            id="max-micro-batch-tokens",
        ),
        pytest.param(
            Scenario(size=25, options={"poisoned": True}, trainer={"gradient_clip_val": 1.0, "max_epochs": 2}),
            id="poisoned-dummy",
        ),
        pytest.param(
            Scenario(accumulate=2, size=33, options={"poisoned": True, "padded": True}), id="poisoned-dummy-tokens"
        ),
        pytest.param(
            Scenario(trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, accumulate=2),
            id="clip-value",
        ),
    ],
)  # fmt: skip
def test_automatic_optimization(workers, scenario):
    results = check_parity(workers, scenario)
    if scenario.options.get("poisoned"):
        assert any(not entry.ids for entry in results[-1].seen), "the last replica had a dummy"
        assert results[-1].metrics["train_loss_epoch"] == results[-1].metrics["train_loss_epoch"], "not NaN"


class Scheduled(Language):
    """A schedule by steps, and clipping in the module's own hook."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val or 0.5, gradient_clip_algorithm)


class OwnNorm(Language):
    """Clips by torch's function in a hook, imported in two ways."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        before = clip_grad_norm_(self.parameters(), 0.5)
        after = torch.nn.utils.clip_grad_norm_(self.parameters(), 100.0)
        torch.testing.assert_close(after, before.clamp(max=0.5), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("module", "clip"), [(Scheduled, None), (Scheduled, 1.0), (OwnNorm, 1.0), (OwnNorm, 0.1)])
def test_hooks(workers, module, clip):
    check_parity(workers, Scenario(module=module, accumulate=2, trainer={"gradient_clip_val": clip}))


# Manual optimization


class Manual(Language):
    """Two backward calls, one of them raw, before one optimizer step; clipping by all means."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss, weight = self.losses(batch)
        penalty = self.model(batch[1].flip(1)).square().mean()
        self.manual_backward(loss)
        (0.1 * penalty).backward()
        self.note(batch, batch_idx, loss, weight)
        if batch_idx % 3 == 0:
            clip_grad_norm_(self.parameters(), 0.5)
        elif batch_idx % 3 == 1:
            self.clip_gradients(optimizer, 0.5, "norm")
        else:
            self.clip_gradients(optimizer, 0.01, "value")
        optimizer.step()


class Collected(Manual):
    """Accumulates by hand over training steps, without and with a sync of each."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        is_step = batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=is_step or self.current_epoch == 0):
            loss, weight = self.losses(batch)
            self.manual_backward(self.note(batch, batch_idx, loss, weight) / 2)
        if is_step:
            optimizer.step()
            optimizer.zero_grad()


class TwoOptimizers(Manual):
    """Disjoint parameters, one of which no loss uses; each order in which two losses can meet two optimizers."""

    def configure_optimizers(self) -> Any:
        named = dict(self.model.named_parameters())
        first = [p for name, p in named.items() if "attn" in name or "embed" in name]
        second = [p for name, p in named.items() if not ("attn" in name or "embed" in name)]
        return make_optimizer("adamw", first), make_optimizer("adamw", second)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        order = (self.toggled, self.toggled_backwards, self.together, self.clipped_between, self.toggled_then_stepped)
        loss, weight = self.losses(batch)
        self.note(batch, batch_idx, loss, weight)
        order[batch_idx % len(order)](batch, *self.optimizers())

    def two_losses(self, batch: tuple[Tensor, Tensor]) -> tuple[Any, Any]:
        return lambda: self.losses(batch)[0], lambda: self.model(batch[1].flip(1)).square().mean()

    def toggled(self, batch: tuple[Tensor, Tensor], first: Any, second: Any) -> None:
        for optimizer, loss in zip((first, second), self.two_losses(batch), strict=True):
            self.toggle_optimizer(optimizer)
            self.manual_backward(loss())
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def toggled_backwards(self, batch: tuple[Tensor, Tensor], first: Any, second: Any) -> None:
        self.toggled(batch, second, first)

    def together(self, batch: tuple[Tensor, Tensor], first: Any, second: Any) -> None:
        one, two = self.two_losses(batch)
        self.manual_backward(one())
        self.manual_backward(two())
        second.step()
        first.step()
        first.zero_grad()
        second.zero_grad()

    def clipped_between(self, batch: tuple[Tensor, Tensor], first: Any, second: Any) -> None:
        """The first gradient is clipped, hence voted on, before the second backward, and used after it."""
        one, two = self.two_losses(batch)
        self.toggle_optimizer(first)
        self.manual_backward(one())
        self.clip_gradients(first, 0.5, "norm")
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        self.manual_backward(two())
        self.untoggle_optimizer(second)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()

    def toggled_then_stepped(self, batch: tuple[Tensor, Tensor], first: Any, second: Any) -> None:
        one, two = self.two_losses(batch)
        for optimizer, loss in ((first, one), (second, two)):
            self.toggle_optimizer(optimizer)
            self.manual_backward(loss())
            self.untoggle_optimizer(optimizer)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()


class Alternating(TwoOptimizers):
    """As Lightning's manual accumulates for two optimizers: one gradient waits unsynced while the other is synced."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss, weight = self.losses(batch)
        self.note(batch, batch_idx, loss, weight)
        is_step = batch_idx % 2 == 1
        for optimizer, loss in zip(self.optimizers(), self.two_losses(batch), strict=True):
            with optimizer.toggle_model(sync_grad=is_step):
                self.manual_backward(loss() / 2)
                if is_step:
                    optimizer.step()
                    optimizer.zero_grad()


@pytest.mark.parametrize("module", [Manual, Collected, TwoOptimizers, Alternating])
def test_manual_optimization(workers, module):
    epochs = 2 if module is Collected else 1
    scenario = Scenario(
        module=module,
        size=64,
        batch_size=4,
        strategy={"shares": [5, 3]},
        trainer={"max_epochs": epochs},
        config=ModelConfig(num_kv_heads=2, layers=1, unused=True),
        norms=False,
    )
    check_parity(workers, scenario)
