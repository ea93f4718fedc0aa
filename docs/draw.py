"""Draw the rooms of distwrap and the imports between them, from the code itself.

python docs/draw.py            # writes the picture, docs/pictures/rooms.svg, and its text, rooms.mmd
python docs/draw.py --check    # exits with 1 where they are not those of the code

The text is a graph in Mermaid's language, for those who would draw it in another way.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from layers import svg  # the file beside this one

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
PICTURES = ROOT / "docs" / "pictures"
TITLE = "The rooms of distwrap, each above those that it imports from"
FACE = "__init__"  # the public names, which the fork server imports before there is a rank


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


def modules(package: Path) -> dict[str, Path]:
    """Return the files of a package by the names of their modules."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imports(package: Path) -> Iterator[Import]:
    """Yield what the modules of a package import from each other, at their top or within functions."""
    known = modules(package)
    for importer, path in known.items():
        tree = ast.parse(path.read_text())
        unreal = {id(node) for guard in ast.walk(tree) if _is_for_types(guard) for node in ast.walk(guard)}
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for imported in dict.fromkeys(name if name in known else name.rpartition(".")[0] for name in names):
                if imported in known and imported != importer:
                    yield Import(importer, imported, node.lineno, id(node) in unreal)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def room_of(module: str) -> str:
    """Return the room of a module: the folder or file right under the package."""
    return (*module.split("."), FACE)[1]


def rooms_in_order() -> list[str]:
    """Return the rooms from the ground up, as the page's table lists them."""
    table = PAGE.read_text().split("| room |", 1)[1].split("\n\n", 1)[0]
    return [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)", row.split("|")[1])]


def arrows(package: Path) -> dict[str, set[str]]:
    """Return the rooms that each room imports, from the ground up; an arrow that follows from others is left out."""
    uses: dict[str, set[str]] = {room: set() for room in rooms_in_order()}
    unknown = {room_of(module) for module in modules(package)} - set(uses)
    if unknown:
        sys.exit(f"{PAGE.name} has no row for {', '.join(sorted(unknown))}: add it to the table of rooms")
    for found in imports(package):
        above, below = room_of(found.importer), room_of(found.imported)
        if above != below != FACE and not found.typing_only:
            uses[above].add(below)
    implied = {room: {deeper for other in below for deeper in _reachable(uses, other)} for room, below in uses.items()}
    return {room: below - implied[room] for room, below in uses.items()}


def _reachable(uses: dict[str, set[str]], room: str) -> set[str]:
    """Return the rooms that a room imports, and those that these import, and so on."""
    found: set[str] = set()
    waiting = [room]
    while waiting:
        new = uses[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def mermaid(uses: dict[str, set[str]]) -> str:
    """Return the picture as text."""
    lines = [f"  {other} --> {room}" for room, below in uses.items() for other in uses if other in below]
    return "\n".join(["graph BT", *lines, ""])


def main() -> int:
    """Write the picture and its text, or compare them."""
    uses = arrows(ROOT / "distwrap")
    drawn = {"rooms.mmd": mermaid(uses), "rooms.svg": svg(uses, TITLE)}
    if "--check" in sys.argv:
        old = [name for name, text in drawn.items() if (PICTURES / name).read_text() != text]
        if old:
            print(f"{', '.join(old)} in docs/pictures: not that of the code, run python docs/draw.py")
        return int(bool(old))
    for name, text in drawn.items():
        (PICTURES / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
