"""The dense single-process run that every distributed run has to equal, and the comparison.

The reference knows nothing of replicas, shares or micro-batches: one model, one forward over the whole global batch,
the loss as a mean over all of it. That a distributed run equals it is the promise of DESIGN section 15.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from tests.support.batches import LENGTH, batch, padded_batch
from tests.support.models import ModelConfig, Transformer, build, loss_fn, padded_loss_fn

OptimizerName = Literal["adamw", "sgd"]


@dataclass
class History:
    """What a run did, by step.

    Attributes:
        losses: Mean loss over the global batch, before the step.
        norms: 2-norm of the whole gradient before clipping; None where a run did not measure it.
        weights: Every parameter by its dense name, whole, after the step. A tied one has its first name only.
        initial: The weights before the first step.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    initial: dict[str, Tensor] = field(default_factory=dict)

    def append(self, loss: float, norm: float | None, weights: dict[str, Tensor]) -> None:
        self.losses.append(float(loss))
        self.norms.append(None if norm is None else float(norm))
        self.weights.append(weights)


def make_optimizer(
    name: OptimizerName, parameters: Iterable[nn.Parameter], lr: float = 1e-3, weight_decay: float = 0.1
) -> torch.optim.Optimizer:
    """The optimizer of a reference run; a distributed run makes its own by the same call."""
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=weight_decay)
    raise ValueError(f"optimizer={name!r} is not known: use 'adamw' or 'sgd'")


def train_dense(
    config: ModelConfig,
    global_batches: Sequence[Sequence[int]],
    *,
    lr: float = 1e-3,
    clip: float | None = 1.0,
    optimizer: OptimizerName = "adamw",
    weight_decay: float = 0.1,
    steps: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    length: int = LENGTH,
    padded: bool = False,
) -> History:
    """Train one dense model in this process.

    Args:
        global_batches: Sample ids of each optimizer step.
        clip: Largest gradient norm, or None.
        steps: How many of ``global_batches`` to take; by default all.
        seed: Of the initial weights.
        length: Tokens of a sample.
        padded: Samples have lengths of their own, and the loss is the mean over the valid tokens of the global batch
            instead of over its samples.
    """
    if steps is not None and steps > len(global_batches):
        raise ValueError(f"steps={steps} is more than the {len(global_batches)} global batches given")
    model = build(config, seed, dtype)
    parameters = list(model.parameters())
    algorithm = make_optimizer(optimizer, parameters, lr, weight_decay)
    history = History(initial=weights_of(model))
    for ids in global_batches[:steps]:
        algorithm.zero_grad(set_to_none=True)
        loss = dense_loss(model, ids, length, padded)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, float("inf") if clip is None else clip)
        algorithm.step()
        history.append(loss.item(), norm.item(), weights_of(model))
    return history


def dense_loss(model: Transformer, ids: Sequence[int], length: int = LENGTH, padded: bool = False) -> Tensor:
    """The mean loss over the samples ``ids`` (or over their valid tokens)."""
    if padded:
        tokens, labels = padded_batch(ids, model.config.vocab, length)
        return padded_loss_fn(model(tokens), labels)[0]
    tokens = batch(ids, model.config.vocab, length)
    return loss_fn(model(tokens), tokens)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_parity(history: History, dense: History, rtol: float = 1e-12) -> None:
    """Check ``history`` against the dense run, step by step.

    ``|loss - loss'| <= rtol |loss'|``, the same for the norm, and ``max|w - w'| <= rtol max|w'|`` over the whole model.

    Raises:
        AssertionError: names the first step that is off, by how much, and the worst parameter.
    """
    __tracebackhide__ = True
    if len(history.losses) != len(dense.losses):
        raise AssertionError(f"{len(history.losses)} steps were run, the dense run has {len(dense.losses)}")
    for step in range(len(dense.losses)):
        problems = [
            _scalar_problem("loss", history.losses[step], dense.losses[step], rtol),
            _scalar_problem("norm", history.norms[step], dense.norms[step], rtol),
            _weights_problem(history.weights[step], dense.weights[step], rtol),
        ]
        if any(problems):
            details = "\n  ".join(problem for problem in problems if problem)
            raise AssertionError(f"step {step} of {len(dense.losses)} differs from the dense run:\n  {details}")


def _scalar_problem(name: str, value: float | None, dense: float | None, rtol: float) -> str:
    if value is None or dense is None or abs(value - dense) <= rtol * abs(dense):
        return ""
    return f"{name} {value!r}, dense {dense!r}: relative difference {abs(value - dense) / abs(dense):.2e} > {rtol:g}"


def _weights_problem(weights: dict[str, Tensor], dense: dict[str, Tensor], rtol: float) -> str:
    if weights.keys() != dense.keys():
        missing, extra = sorted(dense.keys() - weights.keys()), sorted(weights.keys() - dense.keys())
        return f"parameter names differ: missing {missing}, not in the dense model {extra}"
    shapes = [f"{name} {tuple(weights[name].shape)}, dense {tuple(w.shape)}" for name, w in dense.items()
              if weights[name].shape != w.shape]  # fmt: skip
    if shapes:
        return "shapes differ: " + "; ".join(shapes)
    scale = max(w.abs().max().item() for w in dense.values())
    differences = {name: _largest((weights[name] - w).abs()) for name, w in dense.items()}
    off = {name: difference for name, difference in differences.items() if not difference <= rtol * scale}
    if not off:
        return ""
    worst = max(off, key=lambda name: float("inf") if off[name] != off[name] else off[name])
    where = int((weights[worst] - dense[worst]).abs().nan_to_num(torch.inf).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(where), dense[worst].shape))
    names = ", ".join(sorted(off, key=off.__getitem__, reverse=True)[:8])
    return (
        f"weights differ by {off[worst]:.2e} > {rtol:g} x {scale:.3g}, worst in {worst}{list(index)}: "
        f"{weights[worst][index].item()!r}, dense {dense[worst][index].item()!r}; "
        f"{len(off)} of {len(dense)} parameters are off: {names}"
    )


def _largest(values: Tensor) -> float:
    return values.max().item() if values.numel() else 0.0
