"""Rooms import from rooms below them, in the order of docs/explanation/architecture.md, and never in a circle."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distwrap.cli import COMMANDS
from tests.house.package import PACKAGE, ROOT, script, trees

draw, layers = script("draw"), script("layers")

# Rooms above that a room names in its annotations, and imports for the type checker alone.
TYPES_FROM_ABOVE = {
    ("group", "strategies"): "a run has a Strategy",
    ("model", "strategies"): "a wrapped model names its Strategy",
    ("options", "comm"): "the options name an Algorithm",
    ("options", "launch"): "the options name a Launcher",
    ("options", "precision"): "the options name a Precision",
    ("options", "strategies"): "the options name a Strategy",
    ("registry", "precision"): "the table of precisions makes a Precision",
    ("registry", "comm"): "the table of algorithms makes an Algorithm",
    ("registry", "launch"): "the table of launchers makes a Launcher",
    ("registry", "strategies"): "the table of strategies makes a Strategy",
}

# The fork server imports all public names, so that the ranks need not.
TAKES_ALL = ("distwrap.launch.server", "distwrap")


def upward(package: Path, *, typing_only: bool) -> list[Any]:
    """List the imports that go to a room above."""
    order = draw.rooms_in_order()
    return [
        each
        for each in draw.imports(package)
        if each.typing_only is typing_only
        and each[:2] != TAKES_ALL
        and order.index(draw.room_of(each.imported)) > order.index(draw.room_of(each.importer))
    ]


def test_the_page_knows_every_room() -> None:
    """The table of docs/explanation/architecture.md has each folder and file of the package, once."""
    order = draw.rooms_in_order()
    assert len(order) == len(set(order))
    assert set(order) == {draw.room_of(module) for module in draw.modules(PACKAGE)}


def test_imports_between_rooms_go_down() -> None:
    """At run time, and within functions too, a room imports from rooms below it alone."""
    found = upward(PACKAGE, typing_only=False)
    assert not found, "\n".join(map(str, found))


def test_types_from_above_are_few_and_explained() -> None:
    """What the type checker alone imports from above is in a list with reasons, and nothing else is in the list."""
    pairs = {(draw.room_of(each.importer), draw.room_of(each.imported)) for each in upward(PACKAGE, typing_only=True)}
    assert pairs == set(TYPES_FROM_ABOVE)


def test_modules_of_a_room_import_in_no_circle() -> None:
    """Within a room too, no module imports another that needs it itself."""
    uses: dict[str, set[str]] = {module: set() for module in draw.modules(PACKAGE)}
    for each in draw.imports(PACKAGE):
        if not each.typing_only and each[:2] != TAKES_ALL:
            uses[each.importer].add(each.imported)
    circles = []
    for module in uses:
        waiting, seen = sorted(uses[module]), set()
        while waiting:
            other = waiting.pop()
            if other not in seen:
                seen.add(other)
                waiting += uses[other]
        if module in seen:
            circles.append(module)
    assert not circles


def test_an_import_that_goes_up_would_be_seen(tmp_path: Path) -> None:
    """The test above finds an import from above, also within a function, and tells the type checker's apart."""
    package = tmp_path / "distwrap"
    package.mkdir()
    (package / "cli.py").write_text("")
    (package / "errors.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from distwrap.cli import main\n\n"
        "def late():\n    from distwrap import cli\n"
    )
    assert [each.line for each in upward(package, typing_only=False)] == [6]
    assert [each.line for each in upward(package, typing_only=True)] == [3]


@pytest.mark.parametrize(
    ("picture", "change"), [("", ""), ("rooms.mmd", "  errors --> cli\n"), ("rooms.svg", "<text>another</text>")]
)
def test_the_picture_is_that_of_the_code(picture: str, change: str, tmp_path: Path) -> None:
    """docs/draw.py --check agrees with the picture and its text, and would not if one of them had more in it."""
    (tmp_path / "distwrap").symlink_to(PACKAGE)
    for name in ("draw.py", "layers.py", "explanation/architecture.md", "pictures/rooms.mmd", "pictures/rooms.svg"):
        copy = tmp_path / "docs" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((ROOT / "docs" / name).read_text() + change * (copy.name == picture))
    command = [sys.executable, tmp_path / "docs" / "draw.py", "--check"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (done.returncode == 0) is (not change), done.stdout


def test_the_picture_has_each_room_and_arrow() -> None:
    """Each room is a box above all that it imports from, and each arrow that follows from no other is drawn."""
    uses = draw.arrows(PACKAGE)
    layer = layers.layers_of(uses)
    assert all(layer[other] < layer[room] for room, below in uses.items() for other in below)
    drawn = layers.svg(uses, "Rooms")
    assert re.findall(r"<text [^>]*>(\w+)</text>", drawn) == draw.rooms_in_order()
    assert drawn.count('class="arrow"') == sum(map(len, uses.values()))


def test_boxes_of_a_layer_do_not_touch() -> None:
    """Boxes of one layer have room between them, and stand within the picture, however many there are."""
    uses: dict[str, set[str]] = {"ground": set(), "other": set()}
    uses |= {f"room_{number}": {"ground"} for number in range(12)}
    uses["roof"] = {"other", *list(uses)[2:]}
    drawn = layers.svg(uses, "Rooms")
    (width,) = re.findall(r'<svg [^>]* width="(\d+)"', drawn)
    boxes = re.findall(r'<rect class="box" x="([\d.-]+)" y="([\d.]+)" width="(\d+)"', drawn)
    ends = {(float(y), float(x), float(x) + int(wide)) for x, y, wide in boxes}
    assert len(ends) == len(uses)
    assert all(0 < left < right < int(width) for _, left, right in ends)
    assert all(a[0] != b[0] or a[2] < b[1] for a, b in itertools.pairwise(sorted(ends)))


def test_a_circle_is_drawn_in_no_way() -> None:
    """A box that uses one that is not listed before it is an error, since it has no layer."""
    with pytest.raises(KeyError):
        layers.layers_of({"lower": {"upper"}, "upper": {"lower"}})


def test_the_page_has_each_part_of_a_run_and_each_command() -> None:
    """The table of parts names the public classes that are one, and `cli`'s row the commands."""
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    table = page[page.index("| part | room | keeps |") :].split("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    parts = {
        node.name
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any(getattr(base, "id", "") == "RunPart" for base in node.bases)
    }
    assert named - {"Activity"} == {name for name in parts if not name.startswith("_")}  # which is one by its methods
    (row,) = re.findall(r"^\| `cli` \|.*: (.+) \|$", page, re.MULTILINE)
    assert row.split(", ") == list(COMMANDS)
