"""Rooms import from rooms below them, in the order of docs/explanation/architecture.md, and never in a circle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.house.package import PACKAGE, ROOT, script

draw = script("draw")

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


@pytest.mark.parametrize("change", ["", "  errors --> cli\n"])
def test_the_picture_is_that_of_the_code(change: str, tmp_path: Path) -> None:
    """docs/draw.py --check agrees with the page, and would not if the page had another arrow."""
    copy = tmp_path / "docs"
    (copy / "explanation").mkdir(parents=True)
    (tmp_path / "distwrap").symlink_to(PACKAGE)
    (copy / "draw.py").write_text((ROOT / "docs" / "draw.py").read_text())
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    (copy / "explanation" / "architecture.md").write_text(page.replace("graph BT\n", f"graph BT\n{change}"))
    done = subprocess.run([sys.executable, copy / "draw.py", "--check"], capture_output=True, timeout=60, check=False)
    assert (done.returncode == 0) is (not change), done.stdout
