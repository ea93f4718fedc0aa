"""Functions and files that supervision knows by their names are there, in the installed torch and in distwrap."""

from __future__ import annotations

import ast
import re
import sysconfig
from pathlib import Path

import pytest
import torch

import distwrap.data.dispatch
import distwrap.data.lockstep
import distwrap.group.world  # noqa: F401 - which add theirs
from distwrap.supervision import stacks, waits
from tests.house.package import PACKAGE

TORCH = Path(torch.__file__).parent
FILES = {waits._BACKWARD, stacks._DATA_LOADER, stacks._OPTIMIZER}
FUNCTIONS = {
    *stacks.END_OF_RUN,
    (str(PACKAGE / "group" / "wait_for_rank.py"), "share_result"),  # of which Reporter knows more
    (str(TORCH / "_utils.py"), "reraise"),
    (str(TORCH / "optim" / "optimizer.py"), "wrapper"),
    (str(TORCH / "utils" / "_contextlib.py"), "decorate_context"),
}


def defined_in(file: str) -> set[str]:
    """Return the names of the functions and methods of a file."""
    tree = ast.parse(Path(file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("file", "name"), sorted(FUNCTIONS), ids=lambda each: Path(each).name)
def test_a_function_that_is_named_is_there(file: str, name: str) -> None:
    """A function by whose name a stack is read is in the file that is named with it."""
    assert name in defined_in(file)


def test_files_that_are_named_are_there() -> None:
    """A file or folder by whose path a stack is read is in torch or in distwrap."""
    assert all((TORCH.parent / file).is_file() for file in FILES)
    assert all(Path(path).exists() for path in (*waits._DISTRIBUTED, *stacks.LOOPS))


@pytest.mark.slow("others of its kind are in make test")
def test_functions_that_say_little_are_there() -> None:
    """Each function that a hang report does not name is in torch, in distwrap or in the standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    places = (PACKAGE, TORCH / "utils", TORCH)  # most are in the first two
    texts = (path.read_text() for place in places for path in place.rglob("*.py"))
    left = set(stacks._SILENT)
    for text in (*map(Path.read_text, library.glob("*.py")), *texts):
        left -= {name for name in left if re.search(rf"\bdef {name}\(", text)}
        if not left:
            break
    assert not left
