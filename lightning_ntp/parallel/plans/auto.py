"""Find the plan of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_ntp.errors import PlanError
from lightning_ntp.parallel.plan import ParallelPlan
from lightning_ntp.parallel.plans import huggingface, torch_styles
from lightning_ntp.parallel.plans.infer import infer, stub
from lightning_ntp.parallel.plans.patterns import compress
from lightning_ntp.parallel.styles import Style

LARGEST_WHOLE = 0.5
ATTRIBUTES = ("ntp_plan", "parallelize_plan")


@dataclass(frozen=True)
class FoundPlan:
    """A plan and where it comes from.

    Attributes:
        plan: What is sharded.
        source: Where it was found, for people.
        notes: Layers that were left whole, and why; other remarks.
    """

    plan: ParallelPlan
    source: str
    notes: tuple[str, ...] = ()


def find_plan(plan: ParallelPlan | Mapping[str, Any] | str | None, module: nn.Module) -> ParallelPlan:
    """The plan to shard ``module`` by.

    The first of these that exists:

    1. ``plan`` itself, unless it is ``"auto"`` or None. ``{}`` replicates everything.
    2. ``module.ntp_plan`` (a plan, a mapping, or a method or property that gives one), or ``parallelize_plan``; if the
       root has none, those of its submodules, whose patterns start at the submodule.
    3. The plans of the Hugging Face models inside, with the head counts of their modules or config.
    4. An inferred one for ``nn.Linear`` and ``nn.Embedding`` layers; see ``lightning_ntp.parallel.plans.infer``.

    Mappings may hold styles as objects or strings, and torch's ``ColwiseParallel`` and ``RowwiseParallel`` objects, for
    which head counts come from the modules' attributes or a config.

    Args:
        plan: The argument.
        module: The dense model.

    Raises:
        PlanError: if there is nothing to shard, a head count can't be known, or a plan that was found cannot be read.
            The message has a plan to paste.
    """
    return locate_plan(plan, module).plan


def locate_plan(plan: ParallelPlan | Mapping[str, Any] | str | None, module: nn.Module) -> FoundPlan:
    """As ``find_plan``, with the source and remarks."""
    if plan is not None and plan != "auto":
        return FoundPlan(_read(plan, module, "plan"), "the argument")
    return _from_attributes(module) or _from_hugging_face(module) or _inferred(module)


def _read(plan: Any, module: nn.Module, where: str) -> ParallelPlan:
    if callable(plan) and not isinstance(plan, (Mapping, ParallelPlan)):
        plan = plan()
    if isinstance(plan, ParallelPlan):
        return plan
    if not isinstance(plan, Mapping):
        raise PlanError(
            f"{where}={plan!r}: use 'auto', a ParallelPlan, or a mapping such as {{'layers.*.mlp': 'ffn'}}; "
            "{} replicates everything"
        )
    from_torch = {pattern: style for pattern, style in plan.items() if torch_styles.is_torch_style(style)}
    if not from_torch:
        return ParallelPlan(plan)
    ours = ParallelPlan({pattern: style for pattern, style in plan.items() if pattern not in from_torch})
    translated = compress(torch_styles.styles_of(from_torch, module), module)
    return ParallelPlan(ours.styles | translated.styles)


def _from_attributes(module: nn.Module) -> FoundPlan | None:
    """The root's plan, else those of the outermost submodules that have one."""
    styles: dict[str, Style] = {}
    sources: list[str] = []
    for name, part in _outermost(module, lambda part: _attribute(part) is not None):
        attribute = _attribute(part)
        source = f"{name}.{attribute}" if name else attribute
        styles |= _read(getattr(part, attribute), part, source).with_prefix(name).styles
        sources.append(source)
    return FoundPlan(ParallelPlan(styles), ", ".join(sources)) if sources else None


def _attribute(module: nn.Module) -> str | None:
    return next((name for name in ATTRIBUTES if getattr(module, name, None) is not None), None)


def _from_hugging_face(module: nn.Module) -> FoundPlan | None:
    styles: dict[str, Style] = {}
    sources: list[str] = []
    for name, part in _outermost(module, huggingface.is_model):
        translated = huggingface.styles_of(part)
        if translated is None:  # such a model may stand beside others; alone, its plan is inferred
            continue
        styles |= compress(translated, part).with_prefix(name).styles
        sources.append(f"the plan of {type(part).__name__}{f' at {name!r}' if name else ''}")
    return FoundPlan(ParallelPlan(styles), ", ".join(sources)) if sources else None


def _inferred(module: nn.Module) -> FoundPlan:
    found = infer(module)
    if not found.styles:
        kept = "".join(f"\n  {note}" for note in found.notes)
        raise PlanError(
            f"no plan was found for {type(module).__name__}: it has no ntp_plan, is no Hugging Face model with a plan, "
            f"and none of its layers can be sharded without knowing more.{kept}\n"
            f"Give a plan; plan={{}} replicates everything. Its Linears and Embeddings:\n{stub(module)}"
        )
    plan = compress(found.styles, module)
    notes = list(found.notes)
    whole = 1.0 - _sharded_fraction(module, found.styles)
    if whole > LARGEST_WHOLE:
        notes.append(f"{whole:.0%} of the parameters stay whole on every slot; a plan written by hand may do better")
    return FoundPlan(plan, "its Linears and Embeddings", tuple(notes))


def _sharded_fraction(module: nn.Module, styles: Mapping[str, Style]) -> float:
    total = sum(parameter.numel() for parameter in module.parameters())
    parts = {parameter for name in styles for parameter in module.get_submodule(name).parameters()}
    return sum(parameter.numel() for parameter in parts) / max(1, total)


def _outermost(module: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[tuple[str, nn.Module]]:
    """The modules that are wanted, without those inside of one that is."""
    found: list[tuple[str, nn.Module]] = []
    for name, part in module.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer, _ in found)
        if not inside and wanted(part):
            found.append((name, part))
    return found
