"""Parts of the package without those ``__init__`` that import Lightning: a process that a test starts is up in a
second."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def skip_lightning() -> None:
    """From now on ``import lightning_ntp.part`` imports that part and what it needs. To be called before any such."""
    for name in ("lightning_ntp", "lightning_ntp.engine"):
        spec = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
        spec.submodule_search_locations = [str(REPOSITORY / name.replace(".", "/"))]
        sys.modules[name] = importlib.util.module_from_spec(spec)
