"""Files are short, classes have names of their own, and World is typed."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.house.package import PACKAGE, ROOT, trees

LONGEST = 400


def test_files_are_read_in_one_sitting() -> None:
    """No file of the package has more than 400 lines."""
    lengths = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in trees()}
    assert not {path: length for path, length in lengths.items() if length > LONGEST}


def test_no_two_classes_have_one_name() -> None:
    """A class's name says which class is meant, wherever it is read."""
    places = defaultdict(list)
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_the_world_is_typed() -> None:
    """No attribute of World is of any type."""
    assert "Any" not in (PACKAGE / "group" / "world.py").read_text()
