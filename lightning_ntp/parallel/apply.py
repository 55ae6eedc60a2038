"""Turn a dense model into this member's part of it, in place, as a plan says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from lightning_ntp.errors import PlanError, UnsupportedError
from lightning_ntp.layout import GroupedFamily, LayoutFamily, Segment, Sharded, auto_block, block_units, even_units
from lightning_ntp.parallel.block import BlockInput
from lightning_ntp.parallel.context import TensorParallelContext
from lightning_ntp.parallel.linear import ColumnParallelLinear, RowParallelLinear
from lightning_ntp.parallel.localize import LocalHeads
from lightning_ntp.parallel.model import ParallelModel
from lightning_ntp.parallel.module import ParallelModule, Tied
from lightning_ntp.parallel.names import CHILD_NAMES, HEAD_NORMS
from lightning_ntp.parallel.plain import why_not_plain
from lightning_ntp.parallel.plan import ParallelPlan
from lightning_ntp.parallel.styles import (
    FFN,
    Attention,
    Colwise,
    FusedGateUp,
    FusedQKV,
    Replicate,
    Rowwise,
    Style,
    Vocab,
)
from lightning_ntp.parallel.vocabulary import VocabParallelEmbedding


def parallelize(model: nn.Module, plan: ParallelPlan, context: TensorParallelContext) -> ParallelModel:
    """Replace the modules that the plan names by their parallel counterparts, in place.

    Every member must hold the same dense weights before: a slot keeps its part and drops the rest, so initial weights
    do not depend on the layout.

    Args:
        model: The dense model. Its parameters' names do not change.
        plan: What is sharded.
        context: This member's place; the modules keep it.

    Raises:
        PlanError: if the plan does not fit the model.
        UnsupportedError: if the model is already distributed in another way.
    """
    refuse_distributed(model)
    return _Parallelizer(model, plan, context).run()


@dataclass(frozen=True)
class _Site:
    """A module with its name and its parent."""

    name: str
    module: nn.Module
    parent: nn.Module

    @property
    def attribute(self) -> str:
        return self.name.rpartition(".")[2]


class _Parallelizer:
    def __init__(self, model: nn.Module, plan: ParallelPlan, context: TensorParallelContext) -> None:
        self.model, self.plan, self.context = model, plan, context
        self.tied: Tied = {}
        self.result = ParallelModel(model, context)
        self._apply: dict[type, Callable[[_Site, Style], None]] = {
            Colwise: self._colwise,
            Rowwise: self._rowwise,
            Vocab: self._vocab,
            Replicate: self._replicate,
            FusedQKV: self._fused_qkv,
            FusedGateUp: self._fused_gate_up,
            Attention: self._attention,
            FFN: self._ffn,
        }

    def run(self) -> ParallelModel:
        for name, style in self.plan.match(self.model).items():
            self._apply[type(style)](self._site(name), style)
        self._refuse_half_tied()
        self.result.relocate()
        return self.result

    # Layouts

    def _heads(self, num_heads: int, width: int) -> Segment:
        return Segment(LayoutFamily(num_heads, self.context.nominal_degree), even_units(width, num_heads))

    def _kv_heads(self, family: GroupedFamily, width: int) -> Segment:
        return Segment(family, even_units(width, family.num_kv_heads))

    def _features(self, extent: int, units: int | None = None) -> Segment:
        if units is not None:
            return self._heads(units, extent)
        block = auto_block(extent, self.context.nominal_degree, self.context.degrees)
        sizes = block_units(extent, block)
        return Segment(LayoutFamily(len(sizes), self.context.nominal_degree), sizes)

    # Styles

    def _colwise(self, site: _Site, style: Colwise) -> None:
        linear = _expect_linear(site, "colwise")
        layout = Sharded(0, (self._features(linear.out_features, style.units),))
        self._column(site, layout, gather_output=style.gather_output, heads=style.units is not None)

    def _rowwise(self, site: _Site, style: Rowwise) -> None:
        linear = _expect_linear(site, "rowwise")
        layout = Sharded(1, (self._features(linear.in_features, style.units),))
        self._row(site, layout, split_input=style.split_input)

    def _vocab(self, site: _Site, style: Vocab) -> None:
        if isinstance(site.module, nn.Embedding):
            layout = Sharded(0, (self._features(site.module.num_embeddings),))
            self._put(site, VocabParallelEmbedding(site.module, layout, self.context, tied=self.tied))
        else:
            self._colwise(site, Colwise())

    def _replicate(self, site: _Site, style: Replicate) -> None:
        if style.partial_grad:
            self.result.partial_modules.append(site.module)

    def _fused_qkv(self, site: _Site, style: FusedQKV, entry: BlockInput | None = None) -> int:
        linear = _expect_linear(site, "fused_qkv")
        family = self._grouped(site.name, style.num_heads, style.num_kv_heads)
        head_dim, rest = divmod(linear.out_features, family.num_heads + 2 * family.num_kv_heads)
        if rest:
            raise PlanError(
                f"{site.name!r} makes {linear.out_features} features, which are not num_heads={family.num_heads} + "
                f"2 x num_kv_heads={family.num_kv_heads} heads of one size; check the head counts in the plan"
            )
        kv = self._kv_heads(family, family.num_kv_heads * head_dim)
        segments = (self._heads(family.num_heads, family.num_heads * head_dim), kv, kv)
        self._column(site, Sharded(0, segments), heads=True, entry=entry)
        return head_dim

    def _fused_gate_up(self, site: _Site, style: FusedGateUp, entry: BlockInput | None = None) -> None:
        linear = _expect_linear(site, "fused_gate_up")
        if linear.out_features % 2:
            raise PlanError(f"{site.name!r} makes {linear.out_features} features, not [gate | up] of one size")
        half = self._features(linear.out_features // 2)
        self._column(site, Sharded(0, (half, half)), entry=entry)

    def _attention(self, site: _Site, style: Attention) -> None:
        family = self._grouped(site.name, style.num_heads, style.num_kv_heads)
        entry = BlockInput()
        fused = self._child(site, "qkv", style.qkv, required=False)
        if fused is not None:
            head_dim = self._fused_qkv(fused, FusedQKV(family.num_heads, family.num_kv_heads), entry)
        else:
            head_dim = self._split_qkv(site, style, family, entry)
        out = self._child(site, "o", style.o)
        width = _expect_linear(out, "attention").in_features
        _expect_heads(out.name, width, family.num_heads, "num_heads")
        self._row(out, Sharded(1, (self._heads(family.num_heads, width),)))
        entry.attach(site.module)
        self.result.partial_modules += [child for name, child in site.module.named_children() if name in HEAD_NORMS]
        self.result.local_heads.append(LocalHeads.find(site.name, site.module, family, head_dim, style.localize))
        self.result.blocks.append(site.name)

    def _split_qkv(self, site: _Site, style: Attention, family: GroupedFamily, entry: BlockInput) -> int:
        q, k, v = (self._child(site, key, getattr(style, key)) for key in ("q", "k", "v"))
        width = _expect_linear(q, "attention").out_features
        _expect_heads(q.name, width, family.num_heads, "num_heads")
        self._column(q, Sharded(0, (self._heads(family.num_heads, width),)), heads=True, entry=entry)
        for kv in (k, v):
            kv_width = _expect_linear(kv, "attention").out_features
            _expect_heads(kv.name, kv_width, family.num_kv_heads, "num_kv_heads")
            self._column(kv, Sharded(0, (self._kv_heads(family, kv_width),)), heads=True, entry=entry)
        return width // family.num_heads

    def _ffn(self, site: _Site, style: FFN) -> None:
        entry = BlockInput()
        fused = self._child(site, "gate_up", style.gate_up, required=False)
        if fused is not None:
            self._fused_gate_up(fused, FusedGateUp(), entry)
        else:
            gate = self._child(site, "gate", style.gate, required=False)
            for part in filter(None, (gate, self._child(site, "up", style.up))):
                features = self._features(_expect_linear(part, "ffn").out_features)
                self._column(part, Sharded(0, (features,)), entry=entry)
        self._rowwise(self._child(site, "down", style.down), Rowwise())
        entry.attach(site.module)
        self.result.blocks.append(site.name)

    # Replacing

    def _grouped(self, name: str, num_heads: int, num_kv_heads: int | None) -> GroupedFamily:
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or kv_heads < 1 or num_heads % kv_heads:
            raise PlanError(
                f"num_heads={num_heads}, num_kv_heads={kv_heads} for {name!r}: "
                "query heads must be a multiple of KV heads"
            )
        return GroupedFamily(num_heads, kv_heads, self.context.nominal_degree)

    def _column(self, site: _Site, layout: Sharded, **options) -> None:
        module = ColumnParallelLinear(site.module, layout, self.context, tied=self.tied, **options)
        self._put(site, module)

    def _row(self, site: _Site, layout: Sharded, **options) -> None:
        self._put(site, RowParallelLinear(site.module, layout, self.context, tied=self.tied, **options))

    def _put(self, site: _Site, module: nn.Module) -> None:
        _refuse_twice(site)
        reason = why_not_plain(site.module, site.parent)
        if reason is not None:
            raise PlanError(f"the plan shards {site.name!r}, but {reason}; leave it out of the plan, or make it plain")
        module.train(site.module.training)
        setattr(site.parent, site.attribute, module)

    def _site(self, name: str) -> _Site:
        parent = self.model.get_submodule(name.rpartition(".")[0])
        return _Site(name, self.model.get_submodule(name), parent)

    def _child(self, block: _Site, key: str, given: str | None, required: bool = True) -> _Site | None:
        for name in (given,) if given else CHILD_NAMES[key]:
            if isinstance(getattr(block.module, name, None), (nn.Linear, ParallelModule)):
                return self._site(f"{block.name}.{name}")
        if not (required or given):
            return None
        linears = [name for name, child in block.module.named_modules() if isinstance(child, nn.Linear)]
        raise PlanError(
            f"{block.name!r} ({type(block.module).__name__}) has no Linear for {key!r}"
            f"{f' named {given!r}' if given else ''}; its Linears are {linears}; name them, e.g. {key}='...'"
        )

    def _refuse_half_tied(self) -> None:
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if parameter in self.tied:
                raise PlanError(
                    f"parameter {name!r} is tied to one that the plan shards: give both modules a style over the "
                    "vocabulary, such as 'vocab' and 'colwise(gather_output=True)', or replicate both"
                )


def _expect_linear(site: _Site, style: str) -> nn.Linear:
    _refuse_twice(site)
    if not isinstance(site.module, nn.Linear):
        raise PlanError(
            f"style {style!r} is for nn.Linear, but {site.name!r} is a {type(site.module).__name__}; "
            "name the Linear itself, or a block style ('attention(...)', 'ffn') for its parent"
        )
    return site.module


def _refuse_twice(site: _Site) -> None:
    if isinstance(site.module, ParallelModule):
        raise PlanError(f"the plan names {site.name!r} twice: once by itself and once through its block; keep one")


def _expect_heads(name: str, width: int, heads: int, argument: str) -> None:
    if width % heads:
        raise PlanError(f"{name!r} has {width} features, which {argument}={heads} does not divide; check the plan")


def refuse_distributed(model: nn.Module) -> None:
    from torch.distributed.tensor import DTensor

    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise UnsupportedError(
                f"parameter {name!r} is a DTensor (parallelize_module or fully_shard was applied): NTPStrategy shards "
                "the model itself; remove that call and describe the model in `plan`"
            )
    for name, module in model.named_modules():
        if type(module).__name__ in ("FullyShardedDataParallel", "DistributedDataParallel", "OptimizedModule"):
            raise UnsupportedError(
                f"module {name or 'model'!r} is a {type(module).__name__}: NTPStrategy works on the plain model; "
                "remove the wrapper (torch.compile of a sharded model is not supported yet)"
            )

