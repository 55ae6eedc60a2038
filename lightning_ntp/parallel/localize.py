"""Attributes of a user's module that must say what is local: head counts and the like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from lightning_ntp.errors import PlanError
from lightning_ntp.layout import GroupedFamily
from lightning_ntp.parallel.context import TensorParallelContext

QUANTITIES = ("heads", "kv_heads", "group", "width")

# Names that attention code commonly gives to these numbers; taken only where the value is the dense one.
USUAL_NAMES: Mapping[str, str] = {
    "num_heads": "heads",
    "n_heads": "heads",
    "n_head": "heads",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "num_kv_heads": "kv_heads",
    "n_kv_heads": "kv_heads",
    "n_kv_head": "kv_heads",
    "num_key_value_groups": "group",
    "num_kv_groups": "group",
    "n_rep": "group",
    "all_head_size": "width",
}


@dataclass(frozen=True)
class LocalHeads:
    """Keeps one attention module's head counts in step with the slot.

    Attributes:
        module: The user's module.
        family: Query heads and the KV heads that follow them.
        head_dim: Features of a head.
        attributes: Attribute name -> which quantity.
    """

    module: nn.Module
    family: GroupedFamily
    head_dim: int
    attributes: Mapping[str, str]

    @classmethod
    def find(
        cls, name: str, module: nn.Module, family: GroupedFamily, head_dim: int, given: Mapping[str, str] | None
    ) -> LocalHeads:
        """Take the attributes that the plan lists, else those with a usual name and the dense value.

        Raises:
            PlanError: if a listed attribute does not exist, or a quantity is unknown.
        """
        dense = _dense(family, head_dim)
        if given is None:
            usual = {key: q for key, q in USUAL_NAMES.items() if getattr(module, key, None) == dense[q]}
            return cls(module, family, head_dim, usual)
        for attribute, quantity in given.items():
            if quantity not in QUANTITIES:
                raise PlanError(f"localize={{{attribute!r}: {quantity!r}}} at {name!r}: use one of {QUANTITIES}")
            if not hasattr(module, attribute):
                raise PlanError(f"localize names {attribute!r}, which {name!r} ({type(module).__name__}) does not have")
        return cls(module, family, head_dim, dict(given))

    def relocate(self, context: TensorParallelContext) -> None:
        """Write the numbers of the context's slot into the module."""
        heads = len(self.family.queries.at(context.degree).slots[context.slot])
        group = self.family.local_group(context.degree, context.slot)
        heads = max(heads, 1)  # an empty slot computes one ghost head
        if group is None or heads < group:
            group = 1
        local = {"heads": heads, "kv_heads": heads // group, "group": group, "width": heads * self.head_dim}
        for attribute, quantity in self.attributes.items():
            setattr(self.module, attribute, local[quantity])

    def restore(self) -> None:
        """Write the dense numbers into the module."""
        dense = _dense(self.family, self.head_dim)
        for attribute, quantity in self.attributes.items():
            setattr(self.module, attribute, dense[quantity])


def _dense(family: GroupedFamily, head_dim: int) -> dict[str, int]:
    heads, kv_heads = family.num_heads, family.num_kv_heads
    return {"heads": heads, "kv_heads": kv_heads, "group": heads // kv_heads, "width": heads * head_dim}
