"""What would train on silently with wrong numbers, or lose weights without a word."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ntp import NTPStrategy
from tests.lightning.runs import loader, quiet_trainer
from tests.support.models import loss_fn
from tests.support.reference import weights_of
from tests.support.zygote_failures import WorkerError

PLAN = {"embed": "vocab", "mlps.*": "ffn", "head": "colwise(gather_output=True)"}


class FeedForward(nn.Module):
    """With a parameter, or an end of a checkpointed piece, in the middle."""

    def __init__(self, act: str = "gelu", cut: str = "", dropout: float = 0.0) -> None:
        super().__init__()
        self.cut = cut
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.act = nn.PReLU() if act == "prelu" else nn.GELU()
        self.scale = nn.Parameter(torch.tensor(0.7)) if act == "scale" else 1.0
        self.dropout = nn.Dropout(dropout)

    def begin(self, x: Tensor) -> Tensor:
        return self.dropout(self.act(self.up(x)) * self.scale)

    def end(self, h: Tensor) -> Tensor:
        return F.gelu(self.dropout(self.down(self.dropout(h))))

    def forward(self, x: Tensor) -> Tensor:
        begin, end = (
            partial(checkpoint, part, use_reentrant=False) if self.cut == part.__name__ else part
            for part in (self.begin, self.end)
        )
        return end(begin(x))


class Net(LightningModule):
    def __init__(self, seed: int = 0, plan: dict[str, str] | None = None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(101, 16)
        self.mlps = nn.ModuleList(FeedForward(**options) for _ in range(3))
        self.head = nn.Linear(16, 101)
        self.ntp_plan = PLAN if plan is None else plan

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for mlp in self.mlps:
            x = x + mlp(x)
        return self.head(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return loss_fn(self(batch[1]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val", loss_fn(self(batch[1]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Penalized(Net):
    """A gradient in the loss, through every collective of forward and backward."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = entered = self.embed(batch[1])
        for mlp in self.mlps:
            x = x + mlp(x)
        (grad,) = torch.autograd.grad(self.head(x).square().sum(), entered, create_graph=True)
        return super().training_step(batch, batch_idx) + grad.square().mean()


class Shared(Net):
    """A table that three modules share, and a block that is used twice."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.head = nn.Linear(16, 101, bias=False)
        self.second_head = nn.Linear(16, 101, bias=False)
        self.head.weight = self.second_head.weight = self.embed.weight
        self.mlps[2] = self.mlps[0]
        self.ntp_plan = PLAN | {"second_head": "colwise(gather_output=True)"}

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.second_head(self.embed(tokens).tanh())


class Beside(Net):
    """Layers that the plan leaves whole."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.mlps[1](x))


class Marked(Net):
    """Parameters with a mark of the user's, by which the optimizer groups them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for mlp in self.mlps:
            mlp.up.weight.no_decay = True

    def configure_optimizers(self) -> Any:
        marked = [p for p in self.parameters() if hasattr(p, "no_decay")]
        others = [p for p in self.parameters() if not hasattr(p, "no_decay")]
        return torch.optim.AdamW([{"params": others, "weight_decay": 0.5}, {"params": marked, "weight_decay": 0.0}])


class Hooked(Net):
    """A gradient hook on a parameter that the plan shards."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.mlps[0].up.weight.register_hook(lambda grad: grad * 0.0)


def fit(make: Any, strategy: Any, world_size: int, batch_size: int, val_size: int = 7) -> tuple[Any, Net]:
    torch.set_default_dtype(torch.float64)
    seed_everything(7, verbose=False)
    module = make()
    trainer = quiet_trainer(world_size, strategy)
    trainer.fit(module, loader(24, batch_size), loader(val_size, 2))
    return trainer, module


def fit_dense_names(rank: int, world_size: int, store: str, make: Any, degrees: tuple[int, ...]) -> dict[str, Tensor]:
    trainer, _ = fit(make, NTPStrategy(degrees=list(degrees)), world_size, 12 // len(degrees))
    return trainer.strategy.lightning_module_state_dict()


@pytest.mark.parametrize(
    ("make", "degrees"),
    [
        pytest.param(
            partial(Net, act="prelu", plan=PLAN | {"mlps.*.act": "replicate(partial_grad=True)"}), (3, 2), id="partial"
        ),
        pytest.param(Penalized, (3,), id="gradient-of-gradient"),
        pytest.param(Shared, (3, 2), id="shared"),
        pytest.param(Beside, (2, 1), id="beside"),
        pytest.param(Marked, (2, 1), id="marks"),
    ],
)
def test_equals_dense(workers, make, degrees):
    state = workers.run(fit_dense_names, sum(degrees), make, degrees)[0]
    dense = fit(make, "auto", 1, 12)[1].state_dict()
    assert state.keys() == dense.keys()
    for name, value in dense.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (partial(Net, act="prelu"), r"'mlps.0.act.weight'.*used on local values.*'mlps.\*.act': 'replicate\(partial"),
        (partial(Net, act="scale"), r"'mlps.0.scale'.*used on local values.*first put 'scale' into a module"),
        (partial(Beside, plan=PLAN | {"conv": "replicate(partial_grad=True)"}), "'conv.weight'.*on replicated values"),
    ],
)
def test_partial_gradients_are_known(workers, make, told):
    """Each slot would step its copy by a part of the gradient, or all of them by its multiple."""
    with pytest.raises(WorkerError, match=f"(?s)PlanError.*{told}"):
        workers.run(fit_dense_names, 2, make, (2,))


def fit_local(rank: int, world_size: int, store: str, make: Any) -> dict[str, Tensor]:
    return weights_of(fit(make, NTPStrategy(degrees=[world_size]), world_size, 4)[1])


def test_gradient_hooks_are_not_lost(workers):
    with pytest.raises(WorkerError, match=r"weight of shape \(24, 16\) that the plan shards has gradient hooks"):
        workers.run(fit_dense_names, 2, Hooked, (2,))


@pytest.mark.parametrize("cut", ["begin", "end"])
def test_dropout_is_recomputed(workers, cut):
    """A checkpointed piece that begins or ends between the column- and the row-parallel layer draws its masks again."""
    plain, cut_up = (workers.run(fit_local, 2, partial(Net, cut=name, dropout=0.3)) for name in ("", cut))
    for ours, theirs in zip(cut_up, plain, strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=0, atol=0, msg=name)


def change_head(rank: int, world_size: int, store: str) -> Tensor:
    module = Net()
    quiet_trainer(world_size, NTPStrategy(degrees=[2, 1])).validate(module, loader(7, 2), verbose=False)
    torch.manual_seed(rank)
    module.head.register_module("extra", nn.Linear(101, 101))
    module.head.register_forward_hook(lambda head, _, logits: head.extra(logits))
    quiet_trainer(world_size, NTPStrategy(degrees=[2, 1])).fit(module, loader(24, 4))
    return module.head.extra.weight.detach()


def test_a_layer_added_between_two_runs(workers):
    """Every member has made it with weights of its own."""
    first, *others = workers.run(change_head, 3)
    for other in others:
        assert torch.equal(first, other)


def ask_for_state(rank: int, world_size: int, store: str) -> list[str]:
    module = Net()
    trainer = quiet_trainer(world_size, NTPStrategy(degrees=[2]))
    trainer.validate(module, loader(7, 2), verbose=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.save_checkpoint("whole.ckpt")
        before = len(caught)
        module.state_dict()
    return [str(warning.message) for warning in caught[before:]]


def test_parts_do_not_pass_for_the_model(workers):
    told, others = workers.run(ask_for_state, 2)
    assert told and "this member's part of the weights" in told[0] and "trainer.save_checkpoint(path)" in told[0]
    assert not others
