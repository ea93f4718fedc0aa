"""Which pages run in `make test-all`: those that changed, or that use what changed, since all of them were green.

A page is due where its text has changed, or a program that it shows. Where a room of the package has changed, each
name of it that pages use is run by one page at least: a public name, a strategy, launcher, precision or algorithm. The
pages that always run use most of them, so few others are due. `make nightly` runs all.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest

import distwrap
from tests.docs.pages import ROOT, blocks_of
from tests.slow import nightly, slow

ALWAYS = ("README.md", "docs/start.md")
ROOM_OF_OPTION = {"strategy": "strategies", "launcher": "launch", "precision": "precision", "comm": "comm"}


def due(pages: Mapping[str, str], changed: set[str] | None) -> set[str]:
    """Return the names of the pages that are due.

    Args:
        pages: the text of each page by its path from the root.
        changed: the paths that have changed since all were green; ``None`` if nobody knows, and all are due.
    """
    if changed is None:
        return set(pages)
    found = {name for name in pages if name in ALWAYS or changed & {name, *shown_by(name, pages[name])}}
    seen = {use for name in found for use in uses(pages[name])}
    rooms = {path.split("/")[1].removesuffix(".py") for path in changed if path.startswith("distwrap/")}
    for name, text in pages.items():
        new = {use for use in uses(text) if use[0] in rooms} - seen
        if new:
            found.add(name)
            seen.update(uses(text))
    return found


def shown_by(name: str, text: str) -> Iterator[str]:
    """Yield the paths of the files that a page shows beside its own text."""
    folder = (ROOT / name).parent
    for file in re.findall(r"\{literalinclude} (\S+)", text):
        yield str((folder / file).resolve().relative_to(ROOT))


def uses(text: str) -> Iterator[tuple[str, str]]:
    """Yield the room and the name of what the code of a page uses of this package."""
    for block in blocks_of(text):
        if block.mark != "not run" and block.language in ("python", "sh"):
            for option, value in re.findall(r"\b(\w+)=[\"'](\w+)", block.text):
                if option in ROOM_OF_OPTION:
                    yield ROOM_OF_OPTION[option], f"{option}={value}"
            for name in _imported(block.text) if block.language == "python" else ():
                yield distwrap._MODULE_OF[name].partition(".")[0], name


def _imported(code: str) -> Iterator[str]:
    """Yield the public names that a piece of code imports, or asks the package for."""
    try:
        tree = ast.parse(code)
    except SyntaxError:  # its page fails where it runs
        return
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module == "distwrap":
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "distwrap":
            names = [node.attr]
        yield from (name for name in names if name in distwrap._MODULE_OF)


def cases(config: pytest.Config, row: str, names: Iterable[str], due_now: set[str]) -> list[Any]:
    """Return the cases of a test: those that are due now for `make test-all`, and the others for `make nightly`.

    Args:
        config: which tells whether this is `make nightly`, where all run.
        row: of `make nightly`.
        names: one for each case.
        due_now: those of them that are due.
    """
    all_of_them = re.search(r"(?<!not )\bnightly\b", config.option.markexpr) is not None
    why = "a page that has changed, or uses what has, runs in make test-all"
    return [
        nightly(name, row=row, why=why)
        if all_of_them or name not in due_now
        else slow(name, why="it has changed, or uses what has changed, since it was green")
        for name in names
    ]
