"""``lightning-ntp plan FACTORY``: the parallel plan of a model, what each slot holds, and whether the model runs so.

FACTORY is ``module:callable``, such as ``train:MyModule`` or ``my_package.models:make``: called without arguments it
returns the model. Nothing is trained and nothing starts; the model is built without data where its code allows it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_ntp.errors import ConfigError, NTPError
from lightning_ntp.layout import Replicated
from lightning_ntp.parallel.apply import parallelize
from lightning_ntp.parallel.context import TensorParallelContext
from lightning_ntp.parallel.model import ParallelModel, ParallelParameter
from lightning_ntp.parallel.plan import generalize
from lightning_ntp.parallel.plans.auto import FoundPlan, locate_plan
from lightning_ntp.parallel.probing.clone import ShapeExchange
from lightning_ntp.parallel.probing.probe import ShapeProbe

LARGEST_DEGREE = 576
WIDTH = 160  # of a table that goes into a file


def add_parser(subparsers: Any) -> None:
    """Declare the verb's arguments."""
    parser = subparsers.add_parser("plan", help="show and check the parallel plan of a model", description=__doc__)
    parser.add_argument("factory", metavar="FACTORY", help="module:callable that returns the model")
    parser.add_argument("--tensor-parallel-size", type=int, default=8, help="nominal degree (default: 8)")
    parser.add_argument("--min-tensor-parallel-size", type=int, default=1, help="lowest degree to check (default: 1)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one line of JSON")
    form.add_argument("--yaml", action="store_true", help="print the plan alone, to paste into a configuration")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan.

    Raises:
        ConfigError: if FACTORY or a degree cannot be used.
        PlanError: if no plan is found, or it does not fit the model.
    """
    nominal, lowest = args.tensor_parallel_size, args.min_tensor_parallel_size
    if not 1 <= nominal <= LARGEST_DEGREE:
        raise ConfigError(f"--tensor-parallel-size {nominal} is outside 1..{LARGEST_DEGREE}")
    if not 1 <= lowest <= nominal:
        raise ConfigError(f"--min-tensor-parallel-size {lowest} is outside 1..{nominal}, the --tensor-parallel-size")
    result = examine(build(args.factory), nominal, lowest)
    if args.json:
        print(json.dumps(result.as_data()))
    elif args.yaml:
        print(_yaml(result.found))
    else:
        _print(result, Console() if sys.stdout.isatty() else Console(width=WIDTH))
    return 0


@dataclass(frozen=True)
class Examined:
    """A model with its plan, sharded on the meta device.

    Attributes:
        found: The plan and its source.
        model: The sharded model.
        ran: Whether the blocks were run at every degree; None if the model names no example input.
    """

    found: FoundPlan
    model: ParallelModel
    ran: bool | None

    def as_data(self) -> dict[str, Any]:
        return {
            "plan": self.found.plan.as_strings(),
            "source": self.found.source,
            "notes": list(self.found.notes),
            "degrees": list(self.model.context.degrees),
            "checked": self.ran,
            "parameters": [
                {
                    "name": parameter.name,
                    "shape": list(parameter.dense_shape),
                    "layout": _layout(parameter),
                    "imbalance": {str(degree): _imbalance(parameter, degree) for degree in self.model.context.degrees},
                }
                for parameter in self.model.parameters()
            ],
        }


def build(factory: str) -> nn.Module:
    """The model that ``module:callable`` returns, on the meta device if its code allows it.

    Raises:
        ConfigError: if there is no such callable, it fails, or returns something else.
    """
    make = _resolve(factory)
    error: Exception | None = None
    for device in ("meta", "cpu"):
        try:
            with torch.device(device):
                model = make()
        except NTPError:
            raise
        except Exception as failure:  # code that reads values while it builds fails on meta and may do on cpu
            error = failure
            continue
        if not isinstance(model, nn.Module):
            raise ConfigError(f"FACTORY {factory!r} returned a {type(model).__name__}; it must return an nn.Module")
        return model
    raise ConfigError(f"FACTORY {factory!r} failed when called without arguments: {type(error).__name__}: {error}")


def examine(model: nn.Module, nominal_degree: int, lowest_degree: int) -> Examined:
    """Find the plan, shard the model on the meta device, and run its blocks at every degree if an input is known."""
    found = locate_plan("auto", model)
    args, kwargs = _example(model)
    exchange: Any = ShapeExchange(0, nominal_degree)
    context = TensorParallelContext.at(exchange, nominal_degree, 0, nominal_degree, lowest_degree)
    sharded = parallelize(model.to("meta"), found.plan, context)
    return Examined(found, sharded, ShapeProbe(sharded).run(*args, **kwargs) if args or kwargs else None)


def _resolve(factory: str) -> Callable[[], Any]:
    module_name, _, path = factory.partition(":")
    if not module_name or not path:
        raise ConfigError(f"FACTORY {factory!r} must be module:callable, such as train:MyModule")
    sys.path.insert(0, os.getcwd())
    try:
        target: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"FACTORY {factory!r}: cannot import {module_name!r}: {error}") from error
    finally:
        sys.path.remove(os.getcwd())
    for part in path.split("."):
        target = getattr(target, part, None)
        if target is None:
            raise ConfigError(f"FACTORY {factory!r}: module {module_name!r} has no {path!r}")
    if not callable(target):
        raise ConfigError(f"FACTORY {factory!r} is a {type(target).__name__}, not a callable that returns the model")
    return target


def _example(model: nn.Module) -> tuple[tuple, dict[str, Any]]:
    """Lightning's ``example_input_array``, or the inputs that Hugging Face models bring."""
    example = getattr(model, "example_input_array", None)
    if example is None:
        example = getattr(model, "dummy_inputs", None)
    if example is None:
        return (), {}
    if isinstance(example, dict):
        return (), example
    return (example if isinstance(example, tuple) else (example,)), {}


def _print(result: Examined, console: Console) -> None:
    console.print(f"# from {result.found.source}", highlight=False, markup=False)
    print(_yaml(result.found))
    degrees = result.model.context.degrees
    shown = list(dict.fromkeys((*degrees[:2], degrees[-1])))
    table = Table("parameter", "dense shape", "layout", *(f"at {degree}" for degree in shown))
    table.columns[0].overflow = "fold"
    rows: dict[tuple, int] = {}
    for parameter in result.model.parameters():
        row = (generalize(parameter.name), _shape(parameter.dense_shape), _layout(parameter))
        cells = tuple(_at(parameter, degree) for degree in shown)
        rows[(*row, *cells)] = rows.get((*row, *cells), 0) + 1
    for row, count in rows.items():
        table.add_row(f"{row[0]}  x{count}" if count > 1 else row[0], *row[1:])
    console.print(table)
    for note in result.found.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    console.print(_verdict(result), highlight=False, markup=False)


def _verdict(result: Examined) -> str:
    degrees = result.model.context.degrees
    span = f"degree {degrees[0]}" if len(degrees) == 1 else f"degrees {degrees[0]} to {degrees[-1]}"
    if result.ran:
        return f"checked: every block runs at {span}"
    if result.ran is None:
        return f"the plan fits at {span}; give the model an example_input_array to have its forward checked too"
    return f"the plan fits at {span}; the forward could not be checked, as it does not run on tensors without data"


def _yaml(found: FoundPlan) -> str:
    """The plan as YAML; JSON strings are YAML strings."""
    styles = found.plan.as_strings()
    if not styles:
        return "plan: {}"
    return "\n".join(["plan:", *(f"  {json.dumps(pattern)}: {json.dumps(style)}" for pattern, style in styles.items())])


def _layout(parameter: ParallelParameter) -> str:
    layout = parameter.layout
    if isinstance(layout, Replicated):
        return "replicated, partial gradient" if layout.partial_grad else "replicated"
    units = " + ".join(str(segment.family.num_units) for segment in layout.segments)
    return f"dim {layout.dim}: {units} units"


def _imbalance(parameter: ParallelParameter, degree: int) -> float:
    """Largest local size over the mean one; 1 for a replicated parameter."""
    sizes = [parameter.local_shape(degree, slot).numel() for slot in range(degree)]
    return round(max(sizes) * degree / max(1, sum(sizes)), 3)


def _at(parameter: ParallelParameter, degree: int) -> str:
    """Smallest and largest local extent of the sharded dimension, and the imbalance."""
    if isinstance(parameter.layout, Replicated):
        return "whole"
    extents = [parameter.local_shape(degree, slot)[parameter.layout.dim] for slot in range(degree)]
    low, high = min(extents), max(extents)
    return str(high) if low == high else f"{low}..{high}  ({_imbalance(parameter, degree):.3f})"


def _shape(shape: torch.Size) -> str:
    return " x ".join(map(str, shape)) or "scalar"
