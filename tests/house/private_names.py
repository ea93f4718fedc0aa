"""Find the private names of other packages in the code, and those that _internals says it relies on."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import NamedTuple

from distwrap import _internals

# Names with an underscore that their owners document.
DOCUMENTED = {"_exit", "_fields", "_asdict", "_make", "_replace"}
DOCUMENTED |= {"_self_parent", "_self_instance"}  # wrapt: what begins with _self_ belongs to who derives from a proxy
ASKED_BY_NAME = {"getattr", "setattr", "hasattr", "delattr"}


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
        """Whether it is an attribute of a module or class, rather than of each of its instances."""
        return "(" not in self.expression


def relied_on(module: ModuleType) -> Iterator[ReliedOn]:
    """Yield the names that the docstrings of a module of _internals list."""
    for name, function in vars(module).items():
        if not callable(function) or getattr(function, "__module__", "") != module.__name__ or name.startswith("_"):
            continue
        text = " ".join((inspect.getdoc(function) or "").split())
        without = re.search(r"Without it: (.+?\.)(?: Args:| Returns:| Raises:| Example:|$)", text)
        names = text.partition("Relies on ")[2].partition(" Without it:")[0]
        for path, limits in re.findall(r"``([^`]+)``(?: \(((?:since|before) torch [^)]+)\))?", names):
            where, _, expression = path.partition(":")
            bounds = {
                bound: tuple(map(int, release.split(".")))
                for bound, release in re.findall(r"(since|before) torch (\d+\.\d+)", limits)
            }
            yield ReliedOn(where, expression, name, without[1] if without else "", **bounds)


MODULES = [import_module(f"{_internals.__name__}.{each.name}") for each in iter_modules(_internals.__path__)]
TABLE = [each for module in MODULES for each in relied_on(module)]


def is_private(name: str) -> bool:
    """Tell whether a name begins with one underscore, and nobody documents it."""
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != "" and name not in DOCUMENTED


def offences(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Yield each use of a private name that the package does not define itself."""
    own = {name for tree in trees.values() for name in _defined(tree)}
    theirs = {each.name for each in TABLE}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            for name in _used(node):
                of_oneself = isinstance(node, ast.Attribute) and _is_self(node.value)
                if name not in own or (name in theirs and not of_oneself):
                    yield f"{path.name}:{getattr(node, 'lineno', 0)} uses {name}"


def _defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names of functions, classes and variables, and the attributes that are set on self."""
    for node in ast.walk(tree):
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
