"""Whether a Linear or an Embedding does what torch's own does, so that a parallel module can take its place."""

from __future__ import annotations

from torch import nn

from lightning_ntp.compat.modules import has_hooks

# These read their children's weights themselves, at least in evaluation, instead of calling the children.
READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def why_not_plain(module: nn.Module, parent: nn.Module | None = None) -> str | None:
    """Why ``module`` must not be replaced, or None.

    A parallel module has torch's forward over a part of the weight. Anything else that the module does would be lost
    silently: a forward of its own, a parametrization, hooks.

    Args:
        module: An ``nn.Linear`` or ``nn.Embedding``, or a subclass of one.
        parent: The module that holds it.
    """
    base = nn.Embedding if isinstance(module, nn.Embedding) else nn.Linear
    if isinstance(parent, READERS):
        return f"it belongs to a {type(parent).__name__}, which reads its weight without calling it"
    if type(module).forward is not base.forward or "forward" in vars(module):
        return f"it is a {type(module).__name__} with a forward of its own"
    if hasattr(module, "parametrizations"):
        return "its weight is parametrized"
    if has_hooks(module):
        return "it has hooks, which its replacement would not have"
    return None
