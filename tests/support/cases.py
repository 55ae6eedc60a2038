"""The table of parity cases, as data: degrees x model features.

``COVERING`` has every list of degrees and every feature at least once, mixed, and runs in CI. ``FULL`` is the product
of both and runs behind ``make parity``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.support.models import ModelConfig
from tests.support.reference import OptimizerName


@dataclass(frozen=True)
class Case:
    """One distributed run that has to equal the dense one.

    Attributes:
        name: What the model is about, for the id.
        degrees: TP degree of each replica; the nominal degree is their maximum unless ``nominal`` says more.
        shares: Samples of a global batch that each replica takes; by default 3 each.
        accumulate: Micro-batches of a window.
        padded: Token-mean loss over samples of unequal length.
        nominal: Nominal degree.
    """

    name: str
    degrees: tuple[int, ...]
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerName = "adamw"
    shares: tuple[int, ...] = ()
    accumulate: int = 3
    padded: bool = False
    nominal: int = 0

    def __post_init__(self) -> None:
        if not self.shares:
            object.__setattr__(self, "shares", (3,) * len(self.degrees))
        if not self.nominal:
            object.__setattr__(self, "nominal", max(self.degrees))
        if len(self.shares) != len(self.degrees):
            raise ValueError(f"{len(self.shares)} shares for {len(self.degrees)} replicas in case {self.name!r}")

    @property
    def num_ranks(self) -> int:
        return sum(self.degrees)

    @property
    def global_batch_size(self) -> int:
        return sum(self.shares)

    @property
    def id(self) -> str:
        """As "4-3_gqa-6-3_shares-5-3", for ``pytest.param(..., id=case.id)``."""
        parts = ["-".join(map(str, self.degrees)), self.name]
        if self.nominal != max(self.degrees):
            parts.append(f"nominal-{self.nominal}")
        if len(set(self.shares)) > 1:
            parts.append("shares-" + "-".join(map(str, self.shares)))
        if self.optimizer != "adamw":
            parts.append(self.optimizer)
        if self.padded:
            parts.append("padded")
        return "_".join(parts)

    def global_batches(self, steps: int) -> list[list[int]]:
        """Sample ids of ``steps`` optimizer steps, every sample once."""
        size = self.global_batch_size
        return [list(range(step * size, (step + 1) * size)) for step in range(steps)]


DEGREES: tuple[tuple[int, ...], ...] = (
    (1,), (2,), (3,), (4,), (2, 2), (4, 4), (4, 3), (3, 4), (4, 2), (4, 3, 2), (3, 1), (8, 7),
)  # fmt: skip

FEATURES: dict[str, ModelConfig] = {
    "heads-8": ModelConfig(),
    "heads-7": ModelConfig(width=28, num_heads=7, num_kv_heads=7),
    "gqa-8-2": ModelConfig(num_kv_heads=2),
    "gqa-6-3": ModelConfig(width=24, num_heads=6, num_kv_heads=3),
    "fused-qkv": ModelConfig(num_kv_heads=2, fused_qkv=True),
    "fused-qkv-bias": ModelConfig(width=24, num_heads=6, num_kv_heads=3, fused_qkv=True, bias=True),
    "fused-gate-up": ModelConfig(fused_gate_up=True),
    "tied": ModelConfig(tied=True),
    "bias": ModelConfig(bias=True),
    "layernorm": ModelConfig(norm="layer"),
    "gelu-bias": ModelConfig(norm="layer", bias=True, gated=False),
    "no-rotary": ModelConfig(rotary=False),
    "unused": ModelConfig(unused=True),
    "vocab-7-ffn-5": ModelConfig(vocab=7, ffn=5),
}

# Only at (8, 7): elsewhere it costs time and shows nothing new.
WIDE_GQA = ModelConfig(width=64, num_heads=64, num_kv_heads=8, head_dim=2, layers=1)

COVERING: tuple[Case, ...] = (
    Case("gqa-8-2", (1,), ModelConfig(num_kv_heads=2)),
    Case("fused-bias", (2,), ModelConfig(num_kv_heads=2, fused_qkv=True, fused_gate_up=True, bias=True)),
    Case("heads-7", (3,), FEATURES["heads-7"]),
    Case("gqa-8-2-tied", (4,), ModelConfig(num_kv_heads=2, tied=True, norm="layer")),
    Case("heads-8", (2, 2), padded=True),
    Case("gqa-6-3-unused", (4, 4), ModelConfig(width=24, num_heads=6, num_kv_heads=3, unused=True)),
    Case("heads-8-bias", (4, 3), ModelConfig(bias=True), shares=(5, 3)),
    Case("fused-qkv-layernorm", (4, 3), ModelConfig(num_kv_heads=2, fused_qkv=True, norm="layer", tied=True)),
    Case("heads-7-fused-gate-up", (4, 3), ModelConfig(width=28, num_heads=7, num_kv_heads=7, fused_gate_up=True),
         shares=(4, 2)),
    Case("gqa-6-3-bias", (3, 4), ModelConfig(width=24, num_heads=6, num_kv_heads=3, bias=True), padded=True),
    Case("gelu-layernorm-bias", (4, 2), FEATURES["gelu-bias"], shares=(4, 2)),
    Case("no-rotary-bias", (4, 2), ModelConfig(rotary=False, bias=True), optimizer="sgd"),
    Case("gqa-6-3-fused", (4, 3, 2), FEATURES["fused-qkv-bias"], shares=(4, 3, 2)),
    Case("tied-unused", (4, 3, 2), ModelConfig(tied=True, unused=True), padded=True),
    Case("gqa-8-2-layernorm", (3, 1), ModelConfig(num_kv_heads=2, norm="layer"), shares=(5, 1)),
    Case("heads-8-nominal", (3, 1), ModelConfig(fused_gate_up=True), nominal=4),
    Case("gqa-64-8", (8, 7), WIDE_GQA),
    Case("heads-7-vocab-7", (8, 7), ModelConfig(width=28, num_heads=7, num_kv_heads=7, vocab=7, ffn=5, layers=1)),
)  # fmt: skip

FULL: tuple[Case, ...] = (
    *(Case(name, degrees, model) for degrees in DEGREES for name, model in FEATURES.items()),
    Case("gqa-64-8", (8, 7), WIDE_GQA),
)
