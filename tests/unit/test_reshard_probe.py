"""Optimizers whose update is not elementwise are found by trying them out."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from lightning_ntp.errors import UnsupportedError
from lightning_ntp.reshard import check_elementwise


def parameters(dims: tuple[int, ...] = (1, 2, 3)) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones((4, 3, 2)[:n], dtype=torch.float64)) for n in dims]


ELEMENTWISE = {
    "AdamW": lambda p: optim.AdamW(p, lr=1e-3),
    "AdamW, lr=0 in a warm-up": lambda p: optim.AdamW(p, lr=0.0),
    "AdamW, fused": lambda p: optim.AdamW(p, fused=True),
    "AdamW, a loop": lambda p: optim.AdamW(p, foreach=False, amsgrad=True),
    "AdamW, lr a tensor": lambda p: optim.AdamW(p, lr=torch.tensor(1e-3), foreach=False),
    "Adam": lambda p: optim.Adam(p, weight_decay=0.1, maximize=True),
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD, groups": lambda p: optim.SGD([{"params": p[:1]}, {"params": p[1:], "lr": 1.0, "name": "rest"}], lr=0.1),
    **{
        name: lambda p, name=name: getattr(optim, name)(p)
        for name in ("NAdam", "RAdam", "Adagrad", "Adadelta", "Adamax", "RMSprop", "Rprop", "ASGD")
    },
}


class Rule(optim.Optimizer):
    """Plain gradient descent, with something done to the gradient."""

    def __init__(self, params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def change(self, grad: torch.Tensor) -> torch.Tensor:
        return grad

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * self.change(parameter.grad))


class Sign(Rule):
    def change(self, grad: torch.Tensor) -> torch.Tensor:
        return grad.sign()


class Normed(Rule):
    """As LARS and LAMB do."""

    def change(self, grad: torch.Tensor) -> torch.Tensor:
        return grad / grad.norm()


class Centred(Rule):
    def change(self, grad: torch.Tensor) -> torch.Tensor:
        return grad - grad.mean(dim=-1, keepdim=True)


class Noisy(Rule):
    def change(self, grad: torch.Tensor) -> torch.Tensor:
        return grad + torch.randn_like(grad)


class ByRows(Rule):
    """Keeps a mean for every row, which only two-dimensional parameters show."""

    def change(self, grad: torch.Tensor) -> torch.Tensor:
        if grad.dim() == 2:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["rows"] = torch.zeros(grad.shape[0], 1)
        return grad


class Unbuildable(Normed):
    """Not an optimizer that could be built from its options."""

    def __init__(self, params, secret: object) -> None:
        assert secret
        super().__init__(params)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_ones_pass(name):
    check_elementwise(ELEMENTWISE[name](parameters()))
    check_elementwise(Sign(parameters()))


@pytest.mark.parametrize("kind", [Normed, Centred, Noisy], ids=lambda kind: kind.__name__)
def test_others_are_refused(kind):
    with pytest.raises(UnsupportedError, match=f"{kind.__name__} changes a part of a tensor otherwise than the whole"):
        check_elementwise(kind(parameters()))


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "LBFGS"])
def test_torch_ones_that_need_whole_matrices_are_refused(name):
    with pytest.raises(UnsupportedError, match=f"optimizer {name} .*use AdamW, Adam"):
        check_elementwise(getattr(optim, name)(parameters((2,))))


def test_states_of_another_shape_are_refused():
    with pytest.raises(UnsupportedError, match=r"'rows' of shape \(6, 1\)"):
        check_elementwise(ByRows(parameters((2,))))
    check_elementwise(ByRows(parameters((1,))))


def test_what_cannot_be_tried_out_passes():
    check_elementwise(Unbuildable(parameters(), object()))


def test_nothing_is_left_behind():
    before, used = torch.get_rng_state(), optim.AdamW(parameters())
    check_elementwise(used)
    with pytest.raises(UnsupportedError):
        check_elementwise(Noisy(parameters()))
    assert torch.equal(torch.get_rng_state(), before) and not used.state
    assert all(torch.equal(p, torch.ones_like(p)) and p.grad is None for p in used.param_groups[0]["params"])
