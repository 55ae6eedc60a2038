"""The house rules that a reader relies on, checked on the source: import order, pure parts, no module-level state.

Nothing is imported here; every file of the package is parsed. ``LAYERS`` lists the parts from top to bottom: a module
imports from its own layer or a lower one. A new part needs a place in it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "lightning_ntp"
SOURCE = Path(__file__).resolve().parents[2] / PACKAGE

LAYERS = (
    {"cli", "run", "__main__"},
    {"__init__"},  # the public names; what lies below imports from where a thing is defined
    {"strategies"},
    {"supervisor"},  # parent of the members: strategies/launcher starts it, it uses membership and rendezvous
    {"engine"},
    {"checkpoint"},
    {"reshard", "sync", "data"},
    {"hardware"},
    {"membership"},
    {"parallel"},
    {"comm"},
    {"compat"},
    {"reporting"},
    {"faults"},
    {"policy", "topology", "goodput", "planning", "layout"},
    {"config", "errors", "__about__"},
)
PURE = {"policy", "topology", "goodput", "planning", "layout"}
WITHOUT_TORCH = {"policy", "topology", "layout"}
PROCESSES = {"torch.distributed", "torch.multiprocessing", "multiprocessing", "subprocess", "concurrent", "lightning"}
STATELESS_CALLS = {"getLogger", "TypeVar", "ParamSpec", "NewType", "namedtuple", "compile", "frozenset", "tuple"}
DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
MUTATORS = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "discard", "clear"}


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str
    is_package: bool
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def part(self) -> str:
        """The first name below the package, which decides the layer."""
        return self.name.split(".")[1] if "." in self.name else "__init__"

    @cached_property
    def imports(self) -> tuple[str, ...]:
        """Dotted names of all imports, also those inside functions; ``from a import b`` gives ``a.b``."""
        return tuple(name for node in _outside_type_checking(self.tree) for name in self._imported(node))

    def _imported(self, node: ast.AST) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                parents = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
                base = parents[: len(parents) - node.level + 1] + base
            return [".".join([*base, alias.name]) for alias in node.names]
        return []


def _outside_type_checking(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield other
                yield from _outside_type_checking(other)
            continue
        yield child
        yield from _outside_type_checking(child)


Modules = dict[str, Module]


def read_modules() -> Modules:
    modules = {}
    for path in sorted(SOURCE.rglob("*.py")):
        names = [PACKAGE, *path.relative_to(SOURCE).with_suffix("").parts]
        is_package = names[-1] == "__init__"
        name = ".".join(names[:-1] if is_package else names)
        modules[name] = Module(name, is_package, path.read_text(encoding="utf-8"))
    return modules


def own_imports(module: Module, modules: Modules) -> set[str]:
    """The files of the package that a file names in its imports."""
    found = set()
    for name in module.imports:
        if name.split(".")[0] == PACKAGE:
            found.add(name if name in modules else name.rpartition(".")[0])
    return found


def layer_of(part: str) -> int:
    return next((index for index, parts in enumerate(LAYERS) if part in parts), -1)


def upward_imports(modules: Modules) -> list[str]:
    return [
        f"{module.name} imports {other}, which is above it"
        for module in modules.values()
        for other in sorted(own_imports(module, modules))
        if other in modules and layer_of(modules[other].part) < layer_of(module.part)
    ]


def find_cycle(modules: Modules) -> list[str]:
    """A circle of files that import each other, or nothing. What a package's ``__init__`` pulls in doesn't count."""
    try:
        TopologicalSorter({module.name: own_imports(module, modules) for module in modules.values()}).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def reachable(module: Module, modules: Modules) -> set[str]:
    """The file itself and all that it leads to inside the package."""
    seen, waiting = set(), [module.name]
    while waiting:
        name = waiting.pop()
        if name not in seen and name in modules:
            seen.add(name)
            waiting += own_imports(modules[name], modules)
    return seen


def impure_imports(modules: Modules) -> list[str]:
    found = []
    for module in modules.values():
        if module.part not in PURE:
            continue
        banned = PROCESSES | ({"torch"} if module.part in WITHOUT_TORCH else set())
        for name in sorted(reachable(module, modules)):
            hits = {i for i in modules[name].imports if any(i == b or i.startswith(f"{b}.") for b in banned)}
            found += [f"{module.name} leads to {name}, which imports {hit}" for hit in sorted(hits)]
    return found


def module_state(module: Module) -> list[str]:
    """Mutable things in a module's or class's own namespace, and whatever changes a constant."""
    found = [f"{module.name}:{name} holds {ast.unparse(value)[:60]}" for name, value in _stateful(module.tree)]
    constants = {name for name, _ in _assignments(module.tree.body) if _is_constant(name)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Global):
            found.append(f"{module.name}:{node.lineno} has `{ast.unparse(node)}`")
        changed = _changed_name(node)
        if changed in constants and changed != "__all__":
            found.append(f"{module.name}:{node.lineno} changes {changed}")
    return found


def _stateful(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for name, value in _assignments(tree.body):
        parts = value.elts if isinstance(value, ast.Tuple) else [value]
        if not _is_constant(name) and any(isinstance(part, DISPLAYS) or _is_instance(part) for part in parts):
            yield name, value
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for name, value in _assignments(node.body):
                if not _is_constant(name) and isinstance(value, DISPLAYS):
                    yield f"{node.name}.{name}", value


def _assignments(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """(name, value) of what a namespace's own statements bind, also below ``if``, ``try``, ``with`` and loops."""
    for node in body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from ((leaf.id, node.value) for leaf in ast.walk(target) if isinstance(leaf, ast.Name))
        elif isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
            yield node.target.id, node.value
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, (ast.stmt, ast.ExceptHandler))]
            for child in inner:
                yield from _assignments(child.body if isinstance(child, ast.ExceptHandler) else [child])


def _is_constant(name: str) -> bool:
    return name.isupper() or (name.startswith("__") and name.endswith("__"))


def _is_instance(value: ast.expr) -> bool:
    if not isinstance(value, ast.Call):
        return False
    return ast.unparse(value.func).rpartition(".")[2] not in STATELESS_CALLS


def _changed_name(node: ast.AST) -> str | None:
    """The name whose content a node changes: ``NAME[...] = x``, ``del NAME[...]``, ``NAME.append(x)``."""
    owner = None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
        owner = node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        owner = node.func.value
    return owner.id if isinstance(owner, ast.Name) else None


@pytest.fixture(scope="module")
def modules() -> Modules:
    return read_modules()


def test_every_part_has_a_layer(modules):
    unknown = sorted({module.part for module in modules.values() if layer_of(module.part) < 0})
    assert not unknown, f"{unknown}: give them a place in LAYERS"


def test_imports_run_down(modules):
    assert upward_imports(modules) == []


def test_imports_name_files_that_exist(modules):
    missing = [(m.name, other) for m in modules.values() for other in own_imports(m, modules) if other not in modules]
    assert missing == []


def test_no_cycles_between_files(modules):
    assert find_cycle(modules) == []


def test_pure_parts_stay_pure(modules):
    assert impure_imports(modules) == []


def test_only_the_lightning_package(modules):
    wrong = [(m.name, name) for m in modules.values() for name in m.imports if name.startswith("pytorch_lightning")]
    assert wrong == []


def test_no_module_level_state(modules):
    assert [line for module in modules.values() for line in module_state(module)] == []


def sample(name: str, text: str, is_package: bool = False) -> Modules:
    return {name: Module(name, is_package, text)}


def test_the_checks_find_an_import_upward():
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lightning_ntp.engine import a\n"
    lower = "lightning_ntp.layout.x"
    engine = sample("lightning_ntp.engine", "", is_package=True)
    assert upward_imports(engine | sample(lower, text)) == []
    for line in ("import lightning_ntp.engine", "from lightning_ntp import engine", "from .. import engine"):
        found = upward_imports(engine | sample(lower, f"{text}def f():\n    {line}\n"))
        assert found == [f"{lower} imports lightning_ntp.engine, which is above it"]


def test_the_checks_find_a_cycle():
    a, b = "lightning_ntp.comm.a", "lightning_ntp.comm.b"
    assert find_cycle(sample(a, "from lightning_ntp.comm import b") | sample(b, "")) == []
    assert set(find_cycle(sample(a, "from lightning_ntp.comm import b") | sample(b, "from .a import x"))) == {a, b}


def test_the_checks_find_what_is_not_pure():
    config = sample("lightning_ntp.config", "import torch.distributed as dist")
    topology = sample("lightning_ntp.topology", "from lightning_ntp.config import Config")
    planning = sample("lightning_ntp.planning.memory", "import torch\nfrom torch import nn")
    assert impure_imports(config) == impure_imports(planning) == []
    assert impure_imports(config | topology) == [
        "lightning_ntp.topology leads to lightning_ntp.config, which imports torch.distributed"
    ]
    assert impure_imports(sample("lightning_ntp.policy", "from torch import distributed"))
    assert impure_imports(sample("lightning_ntp.planning.memory", "from torch import distributed"))


@pytest.mark.parametrize(
    "text",
    [
        "cache = {}",
        "seen: set[int] = set()",
        "if True:\n    names = []",
        "try:\n    import x\nexcept ImportError:\n    found = list()",
        "first, second = [], []",
        "current = Session()",
        "class A:\n    cache = {}",
        "def f():\n    global counter\n    counter = 1",
        "CACHE = {}\ndef f(x):\n    CACHE[x] = 1",
        "CACHE = []\ndef f(x):\n    CACHE.append(x)",
    ],
)
def test_the_checks_find_module_level_state(text):
    assert module_state(*sample("lightning_ntp.x", text).values())


@pytest.mark.parametrize(
    "text",
    [
        "__all__ = ['a']",
        "_NAMES = {'q': ('q_proj',)}",
        "Moves = tuple[int, ...]",
        "log = logging.getLogger(__name__)",
        "T = TypeVar('T')",
        "def f():\n    cache = {}\n    cache[1] = 2\n    return cache",
        "@dataclass\nclass A:\n    rows: list[int] = field(default_factory=list)",
    ],
)
def test_the_checks_leave_constants_alone(text):
    assert module_state(*sample("lightning_ntp.x", text).values()) == []
