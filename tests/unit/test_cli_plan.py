"""``lightning-ntp plan``: what it prints, and what it says to bad input."""

from __future__ import annotations

import json
import sys

import pytest
import yaml

from lightning_ntp.cli.main import main

FACTORIES = """
import torch
from torch import nn
from lightning_ntp.errors import PlanError


class Net(nn.Module):
    example_input_array = torch.zeros(2, 3, 16)
    cut = 4

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = 4, 4
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).view(*x.shape[:2], -1, self.cut).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, net=Net):
        super().__init__()
        self.layers = nn.ModuleList([net(), net()])
        self.head = nn.Linear(16, 7)
        self.example_input_array = Net.example_input_array.to("cpu")

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Broken(Net):
    def forward(self, x):
        return self.o(self.q(x).view(*x.shape[:2], 4, 4).flatten(2))


class Cases:
    @staticmethod
    def broken():
        return Model(Broken)


def reads_values():
    model = Model()
    if model.head.weight.sum().item() == 0:
        raise ValueError
    del model.example_input_array
    return model


def fails():
    raise RuntimeError("no data set here")


def headless():
    net = Net()
    del net.num_heads, net.head_dim
    return nn.ModuleList([net])


number = 3
def count(): return 3
"""


@pytest.fixture(autouse=True)
def factories(tmp_path, monkeypatch):
    (tmp_path / "factories_of_test.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("factories_of_test", None)


def plan(name: str, *more: str) -> int:
    return main(["plan", f"factories_of_test:{name}", *more])


EXPECTED = {"layers.*": "attention(num_heads=4, num_kv_heads=4)", "head": "colwise(gather_output=True)"}


def test_yaml_is_the_plan(capsys):
    assert plan("Model", "--yaml") == 0
    assert yaml.safe_load(capsys.readouterr().out) == {"plan": EXPECTED}


def test_json(capsys):
    assert plan("Model", "--json", "--tensor-parallel-size", "4", "--min-tensor-parallel-size", "3") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["plan"] == EXPECTED and facts["degrees"] == [4, 3] and facts["checked"] is True
    assert facts["parameters"][0] == {
        "name": "layers.0.q.weight",
        "shape": [16, 16],
        "layout": "dim 0: 4 units",
        "imbalance": {"4": 1.0, "3": 1.5},
    }


def test_table(capsys):
    assert plan("Model", "--tensor-parallel-size", "4") == 0
    text = capsys.readouterr().out
    rows = [" ".join(line.replace("│", "").split()) for line in text.splitlines()]
    assert '  "head": "colwise(gather_output=True)"' in text.splitlines()
    assert "layers.*.o.weight x2 16 x 16 dim 1: 4 units 4 4..8 (1.500) 16" in rows
    assert "layers.*.o.bias x2 16 replicated whole whole whole" in rows
    assert "checked: every block runs at degrees 4 to 1" in text


def test_code_that_needs_values_is_built_on_the_cpu(capsys):
    assert plan("reads_values") == 0
    assert "give the model an example_input_array" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["factories_of_test"], "must be module:callable"),
        (["no_such_module:f"], "cannot import 'no_such_module'"),
        (["factories_of_test:nope"], "has no 'nope'"),
        (["factories_of_test:number"], "is a int, not a callable"),
        (["factories_of_test:count"], "returned a int; it must return an nn.Module"),
        (["factories_of_test:fails"], "failed when called without arguments: RuntimeError: no data set here"),
        (["factories_of_test:headless"], "the number of heads of '0' is not known"),
        (["factories_of_test:Cases.broken"], "'layers.0' (Broken) does not follow the slot: at degree 8"),
        (["factories_of_test:Model", "--tensor-parallel-size", "0"], "--tensor-parallel-size 0 is outside 1..576"),
        (["factories_of_test:Model", "--min-tensor-parallel-size", "9"], "-size 9 is outside 1..8"),
        (["factories_of_test:Model", "--json", "--yaml"], "not allowed with argument"),
    ],
)
def test_bad_input(argv, text, capsys):
    assert main(["plan", *argv]) == 2
    captured = capsys.readouterr()
    assert text in captured.err and captured.err.startswith("lightning-ntp: ") and captured.out == ""
