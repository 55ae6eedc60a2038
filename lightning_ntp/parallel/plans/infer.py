"""A plan for plain ``nn.Linear`` and ``nn.Embedding`` layers about which nobody said anything.

Two kinds of style are used. *Closed* ones give the surrounding code the dense tensors that it knows, whatever it does
with them: an embedding over its vocabulary, a Linear that gathers its output. *Blocks* leave local tensors between
their layers, and are taken only where names, shapes and head counts agree:

* an attention with Linears under usual names for q, k, v and o, whose head count an attribute or a config says;
* a feed-forward with gate, up and down, or up and down with nothing but activations beside them;
* a plain ``nn.Sequential``: Linear, activations, Linear.

A fused [q | k | v] is not taken as a block: its order cannot be seen from outside. Left replicated are layers whose
weight somebody reads without calling them, subclasses with a forward of their own, and layers that are shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from lightning_ntp.errors import PlanError
from lightning_ntp.parallel.names import linear_child
from lightning_ntp.parallel.plain import READERS, why_not_plain
from lightning_ntp.parallel.plans.heads import kv_heads_of, num_heads_of
from lightning_ntp.parallel.plans.patterns import compress
from lightning_ntp.parallel.plans.reads import attributes_read
from lightning_ntp.parallel.styles import FFN, Attention, Colwise, Rowwise, Style, Vocab, format_style

ELEMENTWISE = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.ReLU6, nn.Hardswish,
    nn.Hardtanh, nn.Hardsigmoid, nn.Mish, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Identity, nn.Dropout,
)  # fmt: skip
LAYERS = (nn.Linear, nn.Embedding)
GATHERED = Colwise(gather_output=True)
UNKNOWN = -1  # heads, in a plan that the user has to complete


@dataclass
class Inferred:
    """What was found.

    Attributes:
        styles: Module name -> style.
        notes: What was left whole, and why.
    """

    styles: dict[str, Style] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def infer(model: nn.Module) -> Inferred:
    """Styles for the Linears and Embeddings of ``model``.

    Raises:
        PlanError: if an attention's head count can't be known; the message has a plan to complete.
    """
    return _Inference(model).run()


def stub(model: nn.Module, known: Mapping[str, Style] | None = None) -> str:
    """A plan to paste: what is known, closed styles for the rest, dots for what must be filled in.

    Args:
        model: The dense model.
        known: Module name -> style; an ``Attention`` of ``UNKNOWN`` heads waits for its number.
    """
    styles = dict(known or {})
    blocks = tuple(f"{name}." for name in styles)
    modules = dict(model.named_modules())
    for name, module in modules.items():
        is_open = name and name not in styles and not name.startswith(blocks)
        if is_open and isinstance(module, LAYERS) and why_not_plain(module, modules[name.rpartition(".")[0]]) is None:
            styles[name] = Vocab() if isinstance(module, nn.Embedding) else GATHERED
    lines = [f"    {pattern!r}: {format_style(style)!r},\n" for pattern, style in compress(styles, model)]
    return "plan = {\n" + "".join(lines).replace(f"num_heads={UNKNOWN}", "num_heads=...") + "}"


class _Inference:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = dict(model.named_modules())
        self.found = Inferred()
        self.taken: set[str] = set()
        self.headless: list[str] = []
        self.read = attributes_read(model)
        self.uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
        owners = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        self.tied = {key for key, count in owners.items() if count > 1}

    def run(self) -> Inferred:
        for name, module in self.modules.items():
            if not isinstance(module, READERS):
                self._attention(name, module)
                self._ffn(name, module)
                self._sequential(name, module)
        if self.headless:
            self._refuse_headless()
        for name, module in self.modules.items():
            self._closed(name, module)
        self._drop_half_tied()
        return self.found

    # Blocks

    def _attention(self, name: str, module: nn.Module) -> None:
        q, k, v, o = (self._child(name, module, role) for role in "qkvo")
        if not (name and q and k and v and o):
            return
        width = self.modules[o].in_features
        heads = num_heads_of(self.model, name, width)
        if heads is None:
            self.headless.append(name)
            return
        kv_heads = kv_heads_of(name, heads, width, self.modules[k].out_features)
        if self.modules[q].out_features == width and self.modules[v].out_features == self.modules[k].out_features:
            self._take(name, Attention(heads, kv_heads), (q, k, v, o))

    def _ffn(self, name: str, module: nn.Module) -> None:
        up, down, gate = (self._child(name, module, role) for role in ("up", "down", "gate"))
        if not (name and up and down) or self.modules[up].out_features != self.modules[down].in_features:
            return
        if gate and self.modules[gate].out_features != self.modules[up].out_features:
            return
        named = {up, down, gate}
        others = [child for key, child in module.named_children() if f"{name}.{key}" not in named]
        if all(type(child) in ELEMENTWISE or not list(child.parameters()) for child in others):
            self._take(name, FFN(), tuple(filter(None, (gate, up, down))))

    def _sequential(self, name: str, module: nn.Module) -> None:
        if type(module).forward is not nn.Sequential.forward:
            return
        opened: str | None = None
        for key, child in module.named_children():
            full = f"{name}.{key}" if name else key
            if isinstance(child, nn.Linear) and self._is_free(full):
                if opened is not None and child.in_features == self.modules[opened].out_features:
                    self._take(opened, Colwise(), (opened,))
                    self._take(full, Rowwise(), (full,))
                    opened = None
                else:
                    opened = full
            elif type(child) not in ELEMENTWISE:
                opened = None

    def _refuse_headless(self) -> None:
        names = ", ".join(map(repr, self.headless[:4])) + (", ..." if len(self.headless) > 4 else "")
        known = dict(self.found.styles) | {name: Attention(UNKNOWN) for name in self.headless}
        raise PlanError(
            f"the number of heads of {names} is not known: no attribute such as num_heads or head_dim of the module "
            f"or of a config says it. Complete this plan and give it as the argument or as the model's `ntp_plan`:\n"
            f"{stub(self.model, known)}"
        )

    # Single layers

    def _closed(self, name: str, module: nn.Module) -> None:
        if not name or name in self.taken or not isinstance(module, LAYERS):
            return
        reason = self._why_not(name)
        if reason is not None:
            self.found.notes.append(f"{name!r} stays whole: {reason}")
        else:
            self.found.styles[name] = Vocab() if isinstance(module, nn.Embedding) else GATHERED

    def _drop_half_tied(self) -> None:
        """A weight of several layers is sharded over its vocabulary in all of them or in none."""
        owners: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if id(parameter) in self.tied:
                owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
        for names in owners.values():
            if not all(self.found.styles.get(name) in (Vocab(), GATHERED) for name in names):
                for name in names:
                    if self.found.styles.pop(name, None) is not None:
                        self.found.notes.append(f"{name!r} stays whole: its weight is shared with a layer that does")

    # Checks

    def _child(self, name: str, module: nn.Module, role: str) -> str | None:
        child = linear_child(module, role)
        full = f"{name}.{child}" if name else str(child)
        return full if child is not None and self._is_free(full) else None

    def _is_free(self, name: str) -> bool:
        if name in self.taken or name not in self.modules or self._why_not(name) is not None:
            return False
        return not any(id(parameter) in self.tied for parameter in self.modules[name].parameters())

    def _take(self, name: str, style: Style, children: tuple[str, ...]) -> None:
        self.found.styles[name] = style
        self.taken.update(children)

    def _why_not(self, name: str) -> str | None:
        module = self.modules[name]
        parent, _, attribute = name.rpartition(".")
        if attribute in self.read:
            return f"some method reads {attribute}.weight or .bias directly"
        if self.uses[id(module)] > 1:
            return "it has several names"
        if isinstance(module, nn.Embedding) and (module.max_norm or module.scale_grad_by_freq or module.sparse):
            return "it uses max_norm, scale_grad_by_freq or sparse"
        return why_not_plain(module, self.modules[parent])


