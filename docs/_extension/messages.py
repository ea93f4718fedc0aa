"""Messages of the package's errors, read from its source."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "distwrap"
FILLED_IN = "…"


def messages_of(error: str) -> list[str]:
    """Return the messages with which the files of the package make an error, in order."""
    texts = {"".join(_text_of(words)).strip() for name, words in _calls() if name == error}
    return sorted(text for text in texts if len(text.replace(FILLED_IN, "").strip()) > 10)


@functools.cache
def _calls() -> list[tuple[str, ast.expr]]:
    """Return the name and the first argument of each call in the package, whose files are read once.

    Where the argument calls a function of the same file, which makes the words, each of that function's strings counts.
    """
    found = []
    for path in PACKAGE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
        for node in nodes:
            if isinstance(node, ast.Call) and node.args:
                words = node.args[0]
                made_by = functions.get(_name_of(words.func)) if isinstance(words, ast.Call) else None
                made = [words] if made_by is None else _strings_of(made_by)
                found += [(_name_of(node.func), each) for each in made]
    return found


def _strings_of(function: ast.FunctionDef) -> list[ast.expr]:
    """Return the strings that a function assigns or returns."""
    values = [node.value for node in ast.walk(function) if isinstance(node, (ast.Assign, ast.Return)) and node.value]
    return [value for value in values if isinstance(value, (ast.JoinedStr, ast.Constant)) and _is_text(value)]


def _is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.JoinedStr) or isinstance(getattr(value, "value", None), str)


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _text_of(part: ast.expr) -> Iterator[str]:
    """Yield the words of a string in the source, with an ellipsis for each value that is filled in."""
    if isinstance(part, ast.Constant):
        yield str(part.value)
    elif isinstance(part, ast.JoinedStr):
        for value in part.values:
            yield from _text_of(value)
    elif isinstance(part, ast.BinOp) and isinstance(part.op, ast.Add):
        yield from _text_of(part.left)
        yield from _text_of(part.right)
    else:
        yield FILLED_IN
