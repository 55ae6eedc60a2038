"""Styles: what a plan says of one module. Each is written as an object or a string such as ``"rowwise(units=8)"``."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, fields

from lightning_ntp.errors import PlanError


@dataclass(frozen=True)
class Colwise:
    """A Linear whose output features are dealt to the slots.

    Attributes:
        units: Number of units of one size (heads). Without it the features are cut into blocks of rows.
        gather_output: Return the dense output on every slot.
    """

    units: int | None = None
    gather_output: bool = False


@dataclass(frozen=True)
class Rowwise:
    """A Linear whose input features are dealt to the slots; its output is summed.

    Attributes:
        units: As for ``Colwise``; the layer before must have the same.
        split_input: The input is dense on every slot.
    """

    units: int | None = None
    split_input: bool = False


@dataclass(frozen=True)
class Vocab:
    """An Embedding, or the Linear that makes logits, whose vocabulary rows are dealt to the slots.

    The logits stay local: compute the loss with ``vocab_parallel_cross_entropy``. For ordinary code give the head the
    style ``colwise(gather_output=True)``; it has the same units, so that head and embedding can be tied.
    """


@dataclass(frozen=True)
class Replicate:
    """A module that every slot holds whole.

    Attributes:
        partial_grad: Each slot's gradient is a part of the sum, as for a norm that is applied to local heads.
    """

    partial_grad: bool = False


@dataclass(frozen=True)
class FusedQKV:
    """A Linear that makes [queries | keys | values].

    Attributes:
        num_heads: Query heads.
        num_kv_heads: KV heads; all query heads have their own if not given.
    """

    num_heads: int
    num_kv_heads: int | None = None


@dataclass(frozen=True)
class FusedGateUp:
    """A Linear that makes [gate | up]."""


@dataclass(frozen=True)
class Attention:
    """A module with attention projections inside; all of them share the query heads' map.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: KV heads; as many as query heads if not given.
        q, k, v, o, qkv: Names of the projections inside the module; the usual names are tried if not given.
        localize: Attribute names -> ``"heads"``, ``"kv_heads"``, ``"group"`` (query heads per KV head) or ``"width"``
            (features of the local query heads): attributes that the forward reads and that must say what is local.
            The usual names are tried if not given, where their value fits.
    """

    num_heads: int
    num_kv_heads: int | None = None
    q: str | None = None
    k: str | None = None
    v: str | None = None
    o: str | None = None
    qkv: str | None = None
    localize: Mapping[str, str] | None = None

    def __hash__(self) -> int:
        return hash((self.num_heads, self.num_kv_heads, self.q, self.k, self.v, self.o, self.qkv))


@dataclass(frozen=True)
class FFN:
    """A feed-forward module; its projections share one map.

    Attributes:
        gate, up, down, gate_up: Names of the projections inside the module; the usual names are tried if not given.
    """

    gate: str | None = None
    up: str | None = None
    down: str | None = None
    gate_up: str | None = None


Style = Colwise | Rowwise | Vocab | Replicate | FusedQKV | FusedGateUp | Attention | FFN

_BY_NAME: Mapping[str, type] = {
    "colwise": Colwise,
    "rowwise": Rowwise,
    "vocab": Vocab,
    "replicate": Replicate,
    "fused_qkv": FusedQKV,
    "fused_gate_up": FusedGateUp,
    "attention": Attention,
    "ffn": FFN,
}


def parse_style(text: str | Style, where: str = "") -> Style:
    """Read a style from its string form: a name, or a call with literal arguments.

    Args:
        text: Such as ``"colwise"`` or ``"attention(num_heads=8, num_kv_heads=2)"``; a style object is returned as it
        is. where: The pattern it stands for, for the message.

    Raises:
        PlanError: if the name is unknown or the arguments do not fit.
    """
    problem = f"plan[{where!r}] = {text!r}"
    if not isinstance(text, str):
        if isinstance(text, Style):
            return text
        raise PlanError(f"{problem} is no style; write a string such as 'colwise' or 'attention(num_heads=8)'")
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        name = call.func.id.lower()
        args = [ast.literal_eval(arg) for arg in call.args]
        kwargs = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, AttributeError):
        raise PlanError(f"{problem} is no style; write a name or a call such as 'attention(num_heads=8)'") from None
    if name not in _BY_NAME:
        raise PlanError(f"{problem}: unknown style {name!r}; there are {', '.join(_BY_NAME)}")
    try:
        style = _BY_NAME[name](*args, **kwargs)
    except TypeError:
        known = ", ".join(field.name for field in fields(_BY_NAME[name]))
        raise PlanError(f"{problem}: {name} takes ({known})") from None
    _check_values(style, problem)
    return style


def _check_values(style: Style, problem: str) -> None:
    for field in fields(style):
        value = getattr(style, field.name)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if field.name in ("units", "num_heads", "num_kv_heads") and value is not None and not is_count:
            raise PlanError(f"{problem}: {field.name}={value!r} must be a whole number of at least 1")
        if isinstance(field.default, bool) and not isinstance(value, bool):
            raise PlanError(f"{problem}: {field.name}={value!r} must be True or False")


def format_style(style: Style) -> str:
    """The string form of a style; ``parse_style`` reads it back."""
    name = next(name for name, kind in _BY_NAME.items() if kind is type(style))
    given = {field.name: getattr(style, field.name) for field in fields(style)}
    shown = [
        f"{key}={dict(value) if isinstance(value, Mapping) else value!r}"
        for key, value in given.items()
        if value not in (None, False)
    ]
    return f"{name}({', '.join(shown)})" if shown else name
