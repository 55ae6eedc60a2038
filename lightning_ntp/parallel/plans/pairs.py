"""Column- and row-parallel layers, named one by one, put together to blocks that share a unit map.

Plans of other libraries speak of single Linears and leave it to equal shards that q, k, v and o fit each other. On
unequal shards they fit only where they follow one map, so the layers of one parent module become ``attention`` or
``ffn``.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_ntp.errors import PlanError
from lightning_ntp.parallel.names import CHILD_NAMES, HEAD_NORMS, role_of
from lightning_ntp.parallel.plans.heads import kv_heads_of, num_heads_of
from lightning_ntp.parallel.styles import FFN, Attention, Colwise, Replicate, Rowwise, Style, Vocab

# What a layer may be said to be, before layers are put together.
ALONE: Mapping[str, Style] = {
    "colwise_gather_output": Colwise(gather_output=True),
    "rowwise_split_input": Rowwise(split_input=True),
    "vocab": Vocab(),
    "partial_grad": Replicate(partial_grad=True),
}
IN_BLOCK = ("colwise", "packed_colwise", "rowwise")


def join(kinds: Mapping[str, str], model: nn.Module, origin: str) -> dict[str, Style]:
    """Styles of modules from what is said of their layers.

    Args:
        kinds: Module name -> a key of ``ALONE`` or one of ``IN_BLOCK``.
        model: The dense model.
        origin: Who says so, for messages.

    Raises:
        PlanError: if layers that need each other do not stand in one module, or head counts can't be known.
    """
    styles: dict[str, Style] = {}
    blocks: dict[str, dict[str, str]] = {}
    for name, kind in kinds.items():
        parent, _, child = name.rpartition(".")
        if kind in IN_BLOCK:
            blocks.setdefault(parent, {})[child] = kind
            if parent not in styles:
                styles[parent] = Replicate()  # keeps the place in the order
        else:
            styles[name] = ALONE[kind]
    for parent, children in blocks.items():
        del styles[parent]
        styles.update(_Block(model, parent, children, origin).styles())
    attentions = [name for name, style in styles.items() if isinstance(style, Attention)]
    norms = {f"{name}.{norm}" for name in attentions for norm in HEAD_NORMS}  # the style knows them
    return {name: style for name, style in styles.items() if name not in norms}


class _Block:
    """The column- and row-parallel Linears of one module."""

    def __init__(self, model: nn.Module, name: str, kinds: Mapping[str, str], origin: str) -> None:
        self.model, self.name, self.kinds, self.origin = model, name, kinds, origin
        self.module = model.get_submodule(name)
        self.rows = [child for child, kind in kinds.items() if kind == "rowwise"]
        self.columns = [child for child, kind in kinds.items() if kind != "rowwise"]

    def styles(self) -> dict[str, Style]:
        self._check()
        roles = {role_of(child): child for child in self.columns}
        if {"q", "k", "v"} == roles.keys():
            return {self.name: self._attention(roles)}
        packed = "packed_colwise" in self.kinds.values()
        if len(self.columns) == 1 and (roles.keys() == {"qkv"} or self._is_wider()):
            return self._fused(packed)
        if packed:
            return {self.name: self._ffn({"gate_up": self.columns[0]})} if len(self.columns) == 1 else self._refuse()
        if len(self.columns) == 1:
            return {self.name: self._ffn({"up": self.columns[0]})}
        if len(self.columns) == 2:
            return {self.name: self._ffn(dict(zip(("gate", "up"), self.columns, strict=True)))}
        return self._refuse()

    def _check(self) -> None:
        for child in self.kinds:
            if not isinstance(getattr(self.module, child, None), nn.Linear):
                kind = type(getattr(self.module, child, None)).__name__
                raise PlanError(
                    f"{self.origin} calls {self._full(child)!r} {self.kinds[child]!r}, but it is a {kind}, not an "
                    "nn.Linear; give `plan` without it"
                )
        if len(self.rows) != 1 or not self.columns:
            self._refuse()

    def _refuse(self):
        raise PlanError(
            f"{self.origin} has the column-parallel layers {self.columns} and the row-parallel layers {self.rows} in "
            f"{self.name or 'the model itself'!r}, which make neither an attention (q, k, v -> o) nor a feed-forward "
            "(gate, up -> down); write a plan, e.g. plan={'layers.*.attn': 'attention(num_heads=8, q=..., o=...)'}"
        )

    def _attention(self, roles: Mapping[str | None, str]) -> Attention:
        heads, width = self._heads()
        kv_heads = kv_heads_of(self.name, heads, width, self._linear(roles["k"]).out_features)
        names = {"q": roles["q"], "k": roles["k"], "v": roles["v"], "o": self.rows[0]}
        return Attention(heads, kv_heads, **self._unusual(names))

    def _fused(self, packed: bool) -> dict[str, Style]:
        """[q | k | v] if the plan says that it is packed; else a plain cut must be right, so heads lie side by side."""
        heads, width = self._heads()
        if packed:
            kv_width = (self._linear(self.columns[0]).out_features - width) // 2
            kv_heads = kv_heads_of(self.name, heads, width, kv_width)
            names = {"qkv": self.columns[0], "o": self.rows[0]}
            return {self.name: Attention(heads, kv_heads, **self._unusual(names))}
        return {self._full(self.columns[0]): Colwise(units=heads), self._full(self.rows[0]): Rowwise(units=heads)}

    def _ffn(self, names: dict[str, str]) -> FFN:
        return FFN(**self._unusual(names | {"down": self.rows[0]}))

    def _heads(self) -> tuple[int, int]:
        width = self._linear(self.rows[0]).in_features
        heads = num_heads_of(self.model, self.name, width)
        if heads is None:
            raise PlanError(
                f"the number of heads of {self.name!r} is not known: {self.origin} does not say it, and neither the "
                "module nor a config has num_heads; write plan={'" + self.name + "': 'attention(num_heads=...)', ...}"
            )
        return heads, width

    def _is_wider(self) -> bool:
        """Whether the only column-parallel layer makes more than the row-parallel one reads: a fused projection."""
        return self._linear(self.columns[0]).out_features == 3 * self._linear(self.rows[0]).in_features

    def _unusual(self, names: Mapping[str, str]) -> dict[str, str]:
        return {role: child for role, child in names.items() if child not in CHILD_NAMES[role]}

    def _linear(self, child: str) -> nn.Linear:
        return getattr(self.module, child)

    def _full(self, child: str) -> str:
        return f"{self.name}.{child}" if self.name else child
