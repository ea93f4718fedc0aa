"""Private names of other packages are in _internals alone, where each function says what it relies on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.house.package import PACKAGE, nodes, trees

# Names with an underscore that their owners document.
DOCUMENTED = {"_exit", "_fields", "_asdict", "_make", "_replace"}
DOCUMENTED |= {"_self_parent", "_self_instance"}  # wrapt: what begins with _self_ belongs to who derives from a proxy
ASKED_BY_NAME = {"getattr", "setattr", "hasattr", "delattr"}
# Functions and classes of _internals that need no private name.
OF_PUBLIC_NAMES = {"replaced", "answering", "set_metadata", "worker_info_shown", "IteratorHook", "batch_norm_of_all"}

# Each is an offence.
PLANTED = (
    "import torch._dynamo",
    "from torch.utils._pytree import tree_map",
    "from torch.nn.modules.batchnorm import _NormBase",
    "import sys; sys._current_frames()",
    "def f(model): return model.reducer._rebuild_buckets()",
    "def f(scaler): return getattr(scaler, '_found_inf_per_device')",
    "class Mine:\n    def f(self): return self._pre_forward()",
    "class Mine:\n    _config = 3\ndef f(process): return process._config",
)
# A private name that the package defines itself is none.
PLAIN = "import os\nclass Mine:\n    def __init__(self): self._own = 3\ndef f(mine): return mine._own or os._exit(1)"


class ReliedOn(NamedTuple):
    """A private name of which a function of _internals says that it relies on it.

    Attributes:
        module: which has the name.
        expression: that leads to the name in the module, as ``"GradScaler()._scale"``.
        function: which uses it.
        without: the words that say what happens without it.
        since: the first version of torch that has the name, where older ones are supported too.
        before: the first version of torch that does not have it any more.
    """

    module: str
    expression: str
    function: str
    without: str
    since: tuple[int, ...] = ()
    before: tuple[int, ...] = ()

    def is_in(self, release: tuple[int, ...]) -> bool:
        """Return whether that version of torch has the name."""
        return self.since <= release and (not self.before or release < self.before)

    @property
    def owner(self) -> str:
        """The expression that leads to what has the name."""
        return self.expression.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The private name itself, or the one within a private module."""
        return self.expression.rpartition(".")[2]

    @property
    def can_be_hidden(self) -> bool:
        """Whether it is an attribute of a module or class, rather than of each instance, that no import needs."""
        return "(" not in self.expression and self.name not in ("_module_locks", "_data")


def problems(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Yield each private name outside of _internals, and what _internals does not say of one."""
    yield from offences({path: tree for path, tree in trees.items() if "_internals" not in path.parts})
    for path, tree in trees.items():
        if "_internals" in path.parts and path.stem != "__init__":
            relied = list(relied_on(path, tree))
            for name in _functions(tree).keys() - {each.function for each in relied} - OF_PUBLIC_NAMES:
                yield f"{path.name}: {name} does not say which private names it relies on"
            for each in relied:
                if not each.without:
                    yield f"{path.name}: {each.function} does not say what happens without {each.name}"
            if not re.search(r"(were|was) seen in version", ast.get_docstring(tree) or ""):
                yield f"{path.name} does not say in which versions its names were seen"
    for code in PLANTED:
        if not list(offences({Path("planted.py"): ast.parse(code)})):
            yield f"This private name would not be seen: {code}"
    yield from offences({Path("plain.py"): ast.parse(PLAIN)})


def relied_on(path: Path, tree: ast.Module) -> Iterator[ReliedOn]:
    """Yield the names that the docstrings of a module of _internals list."""
    for name, function in _functions(tree).items():
        text = " ".join((ast.get_docstring(function) or "").split())
        without = re.search(r"Without it: (.+?\.)(?: Args:| Returns:| Raises:| Example:|$)", text)
        names = text.partition("Relies on ")[2].partition(" Without it:")[0]
        for place, limits in re.findall(r"``([^`]+)``(?: \(((?:since|before) torch [^)]+)\))?", names):
            where, _, expression = place.partition(":")
            bounds = {
                bound: tuple(map(int, release.split(".")))
                for bound, release in re.findall(r"(since|before) torch (\d+\.\d+)", limits)
            }
            yield ReliedOn(where, expression, name, without[1] if without else "", **bounds)


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """Return the public functions and classes of a module."""
    found = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return {node.name: node for node in found if not node.name.startswith("_")}


TABLE = [each for path, tree in trees(PACKAGE / "_internals").items() for each in relied_on(path, tree)]


def is_private(name: str) -> bool:
    """Tell whether a name begins with one underscore, and nobody documents it."""
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != "" and name not in DOCUMENTED


def offences(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Yield each use of a private name that the package does not define itself."""
    own = {name for tree in trees.values() for name in _defined(tree)}
    theirs = {each.name for each in TABLE}
    for path, tree in trees.items():
        for node in nodes(tree):
            for name in _used(node):
                of_oneself = isinstance(node, ast.Attribute) and _is_self(node.value)
                if name not in own or (name in theirs and not of_oneself):
                    yield f"{path.name}:{getattr(node, 'lineno', 0)} uses {name}"


def _defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names of functions, classes and variables, and the attributes that are set on self."""
    for node in nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr
        elif (
            isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.slice, ast.Constant)
        ):
            yield str(node.slice.value)  # self.__dict__["_name"] = …
        elif isinstance(node, ast.Dict):
            yield from (key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def _used(node: ast.AST) -> Iterator[str]:
    """Yield the private names that a piece of code reads, imports, or asks for by a string."""
    if isinstance(node, ast.Attribute):
        names = [node.attr]
    elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("distwrap"):
        names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
    elif isinstance(node, ast.Import):
        names = [
            part for alias in node.names for part in alias.name.split(".") if not alias.name.startswith("distwrap")
        ]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ASKED_BY_NAME:
        names = [arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)]
    else:
        names = []
    yield from filter(is_private, names)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")
