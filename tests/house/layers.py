"""Rooms import from rooms below them, in the order of docs/explanation/architecture.md; no imports close a circle.

Imports for type checkers alone count too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.house.package import PACKAGE, ROOT, nodes as walked

PAGE = ROOT / "docs" / "explanation" / "architecture.md"
FACE = "__init__"  # the public names

# Rooms above that a room names in its annotations, and imports for the type checker alone.
TYPES_FROM_ABOVE = {
    ("decorator", "prove"): "a decorated function can be proven",
    ("testing", "prove"): "a test imports it where it asks for it",
}

# Imports for types that close a circle. No new ones: what several rooms name stands in protocols.py.
CLOSE_A_CIRCLE = {("distwrap.strategies.fsdp.sharded", "distwrap.strategies.fsdp.strategy")}

# The fork server imports all public names, so that the ranks need not.
TAKES_ALL = ("distwrap.launch.server", "distwrap")

# What must be seen: an import from above within a function, one for types, and two pairs of modules in a circle, one of
# them closed for types alone.
PLANTED = {
    "distwrap/cli.py": "import distwrap.errors\n",
    "distwrap/errors.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from distwrap.cli import main\n\n"
        "def late():\n    from distwrap import cli\n"
    ),
    "distwrap/checks.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import distwrap.nesting\n",
    "distwrap/nesting.py": "import distwrap.checks\n",
}


class Import(NamedTuple):
    """One module's import of another module of the package.

    Attributes:
        importer: the importing module, as ``"distwrap.group.world"``.
        imported: the imported module.
        line: of the importer's file.
        typing_only: whether it is under ``if TYPE_CHECKING``, and so is not done at run time.
    """

    importer: str
    imported: str
    line: int
    typing_only: bool

    def __str__(self) -> str:
        return f"{self.importer} imports {self.imported} (line {self.line})"


def problems(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Yield what is wrong with the rooms, and what of that would not be seen."""
    order = rooms_in_order()
    there = {room_of(module) for module in modules(trees)}
    if sorted(order) != sorted(there):
        yield f"{PAGE.name}'s table of rooms and distwrap/ differ: {', '.join(sorted({*order} ^ there)) or 'twice'}"
    found = list(imports(trees))
    yield from wrong(found, order)
    for_types = set(map(rooms_of, found_upward(found, order, typing_only=True)))
    for pair in for_types ^ set(TYPES_FROM_ABOVE):
        yield f"TYPES_FROM_ABOVE and the imports for types differ: {pair}"
    yield from (f"{each}, and imports torch alone" for each in found if each.importer == "distwrap.protocols")
    for pair in CLOSE_A_CIRCLE - {each[:2] for each in found}:
        yield f"CLOSE_A_CIRCLE has an import that is gone: {pair}"
    planted = {PACKAGE.parent / name: ast.parse(text) for name, text in PLANTED.items()}
    seen = list(imports(planted))
    told = list(wrong(seen, order))
    if not [each for each in found_upward(seen, order, typing_only=True) if each.line == 3]:
        yield "An import for types would not be seen."
    if len(told) != 5:
        yield f"An import from above and a circle would not be seen: {told}"


def wrong(found: list[Import], order: list[str]) -> Iterator[str]:
    """Yield each import that goes up, and each module that needs itself."""
    yield from map(str, found_upward(found, order, typing_only=False))
    uses: dict[str, set[str]] = {}
    for each in found:
        if each[:2] != TAKES_ALL and each[:2] not in CLOSE_A_CIRCLE:
            uses.setdefault(each.importer, set()).add(each.imported)
    for module in uses:
        waiting, seen = [module], set()
        while waiting:
            new = uses.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        if module in seen:
            yield f"{module} imports modules that need itself"


def found_upward(found: list[Import], order: list[str], *, typing_only: bool) -> list[Import]:
    """List the imports that go to a room above."""
    place = {room: number for number, room in enumerate(order)}
    return [
        each
        for each in found
        if each.typing_only is typing_only
        and each[:2] != TAKES_ALL
        and place.get(room_of(each.imported), 0) > place.get(room_of(each.importer), 0)
    ]


def modules(trees: dict[Path, ast.Module]) -> dict[str, ast.Module]:
    """Return the syntax trees of a package by the names of its modules."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in trees}
    return {names[path].removesuffix(".__init__"): tree for path, tree in trees.items()}


def imports(trees: dict[Path, ast.Module]) -> Iterator[Import]:
    """Yield what the modules of a package import from each other, at their top or within functions."""
    known = modules(trees)
    for importer, tree in known.items():
        nodes = [(node, node.lineno) for node in walked(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        for_types = [range(node.lineno, (node.end_lineno or 0) + 1) for node in tree.body if _is_for_types(node)]
        for node, line in nodes:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif node.module is not None:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for imported in dict.fromkeys(name if name in known else name.rpartition(".")[0] for name in names):
                if imported in known and imported != importer:
                    yield Import(importer, imported, line, any(line in lines for lines in for_types))


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def room_of(module: str) -> str:
    """Return the room of a module: the folder or file right under the package."""
    return (*module.split("."), FACE)[1]


def rooms_of(each: Import) -> tuple[str, str]:
    """Return the rooms of both modules of an import."""
    return room_of(each.importer), room_of(each.imported)


def rooms_in_order() -> list[str]:
    """Return the rooms from the ground up, as the page's table lists them."""
    table = PAGE.read_text().split("| room |", 1)[1].split("\n\n", 1)[0]
    return [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)", row.split("|")[1])]
