"""Which layers' weights a model's own code reads, instead of calling the layer.

``F.linear(x, self.embed.weight)`` would see the local part of a sharded table and not notice. The source of the model's
classes is searched for such reads; where there is no source, nothing is found.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator

from torch import nn

# Set-up code runs before the model is sharded.
SETUP = ("init", "reset_parameters", "configure_optimizers", "tie_weights", "extra_repr")
TENSOR_NAMES = ("weight", "bias")
# What does not depend on the part that is held.
HARMLESS = ("dtype", "device", "requires_grad", "requires_grad_", "is_cuda")


def attributes_read(model: nn.Module) -> frozenset[str]:
    """Names ``x`` for which some method of the model's classes reads ``x.weight`` or ``x.bias``."""
    found: set[str] = set()
    for kind in {type(module) for module in model.modules()}:
        if not kind.__module__.startswith(("torch.", "lightning.", "torchmetrics.", "lightning_ntp.")):
            found.update(_read_in(kind))
    return frozenset(found)


def _read_in(kind: type) -> Iterator[str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and not any(word in function.name for word in SETUP):
            harmless = {id(node.value) for node in ast.walk(function) if _is_harmless(node)}
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and node.attr in TENSOR_NAMES and id(node) not in harmless:
                    owner = node.value
                    if isinstance(owner, (ast.Attribute, ast.Name)):
                        yield owner.attr if isinstance(owner, ast.Attribute) else owner.id


def _is_harmless(node: ast.AST) -> bool:
    """``x.weight.dtype``, or a tie made late: ``self.head.weight = self.embed.weight``."""
    if isinstance(node, ast.Attribute):
        return node.attr in HARMLESS
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)
