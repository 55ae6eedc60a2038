"""A Hugging Face model's own tensor-parallel plan, translated.

Nothing is imported from ``transformers``: a model is recognised by its attributes. Read are its plan (``_tp_plan``,
which the library fills from ``config.base_model_tp_plan``), the head counts of its attention modules or its config,
and its embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_ntp.errors import PlanError
from lightning_ntp.parallel.plain import why_not_plain
from lightning_ntp.parallel.plan import matching
from lightning_ntp.parallel.plans.pairs import join
from lightning_ntp.parallel.styles import Colwise, Style, Vocab

# Their words -> ours. Old and new names of transformers 4.5x and 5.x.
KINDS: Mapping[str, str | None] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "packed_colwise": "packed_colwise",
    "colwise_rep": "colwise_gather_output",
    "colwise_gather_output": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "rowwise_split_input": "rowwise_split_input",
    "embedding_rowwise": "vocab",
    "embedding_colwise": "vocab",
    "vocab_parallel_rowwise": "vocab",
    "replicated_with_grad_allreduce": "partial_grad",
    "replicate": None,
    "replicated": None,
}


def is_model(module: nn.Module) -> bool:
    """Whether ``module`` is a Hugging Face model."""
    return all(hasattr(module, name) for name in ("base_model_prefix", "config", "get_input_embeddings"))


def styles_of(model: nn.Module) -> dict[str, Style] | None:
    """Module name -> style, or None if the model comes without a plan.

    Args:
        model: A Hugging Face model, dense.

    Raises:
        PlanError: if its plan says what we cannot do (experts, sequence parallelism), with the names.
    """
    raw = _raw_plan(model)
    if not raw:
        return None
    origin = f"the plan of {type(model).__name__}"
    styles = join(_kinds(model, raw, origin), model, origin)
    _embeddings(model, styles)
    return styles


def _raw_plan(model: nn.Module) -> dict[str, Any]:
    plan = getattr(model, "_tp_plan", None)
    if plan:
        return dict(plan)
    base = getattr(model.config, "base_model_tp_plan", None) or {}
    prefix = model.base_model_prefix if hasattr(model, model.base_model_prefix or " ") else ""
    return {f"{prefix}.{pattern}" if prefix else pattern: style for pattern, style in base.items()}


def _kinds(model: nn.Module, raw: Mapping[str, Any], origin: str) -> dict[str, str]:
    """What their plan says of each module; patterns for modules that this model does not have are left out."""
    modules = dict(model.named_modules())
    parameters = [name for name, _ in model.named_parameters()]
    kinds: dict[str, str] = {}
    unknown: dict[str, Any] = {}
    for pattern, style in raw.items():
        hits = matching(pattern, modules)
        is_known = isinstance(style, str) and style in KINDS
        if (hits and not is_known) or (not hits and matching(pattern, parameters)):
            unknown[pattern] = style
        kind = KINDS[style] if is_known else None
        for name in hits if kind else ():
            kinds[name] = "vocab" if isinstance(modules[name], nn.Embedding) else kind
    if unknown:
        raise PlanError(
            f"{origin} has styles that are not supported: "
            + ", ".join(f"{pattern!r}: {style!r}" for pattern, style in unknown.items())
            + "; write a plan that leaves these modules replicated: plan={pattern: style, ...}"
        )
    return kinds


def _embeddings(model: nn.Module, styles: dict[str, Style]) -> None:
    """Shard the input embedding and the head over the vocabulary; both or neither if they share a weight."""
    names = {id(module): name for name, module in model.named_modules()}
    parents = dict(model.named_modules())
    table, head = model.get_input_embeddings(), _head(model)
    plain = {}
    for module in (table, head):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            name = names[id(module)]
            plain[id(module)] = name if why_not_plain(module, parents[name.rpartition(".")[0]]) is None else None
    if isinstance(table, nn.Embedding) and plain[id(table)] is not None and _is_usual(table):
        styles[names[id(table)]] = Vocab()
    else:
        styles.pop(names.get(id(table), ""), None)
    if head is None or table is None or head.weight is not table.weight:
        return
    if plain.get(id(head)) is not None and plain.get(id(table)) is not None and _is_usual(table):
        styles[names[id(head)]] = Colwise(gather_output=True)
    else:
        styles.pop(names[id(head)], None)
        styles.pop(names[id(table)], None)


def _head(model: nn.Module) -> nn.Module | None:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return head if isinstance(head, nn.Linear) else None


def _is_usual(table: nn.Embedding) -> bool:
    return table.max_norm is None and not table.scale_grad_by_freq and not table.sparse
