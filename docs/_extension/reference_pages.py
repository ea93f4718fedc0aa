"""Sphinx directives that write reference pages from the code.

``{every-message} ModelError`` lists each message with which the package raises this error, read from the source, so
that a search for a message finds the page. What a message fills in is shown as an ellipsis.

A link such as ``[`mean`](collectives.md)`` goes to the function itself, and not to the top of its page. A function has
one signature: the overloads are for type checkers.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

import distwrap

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


class EveryMessage(SphinxDirective):
    """List of all messages of the error that the directive names."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return one list, an item a message."""
        found = nodes.bullet_list(classes=["messages"])
        for text in messages_of(self.arguments[0]):
            item = nodes.list_item()
            item += nodes.paragraph("", "", nodes.literal(text, text))
            found += item
        return [found] if len(found) else []


def link_to_functions(app: Sphinx, docname: str, source: list[str]) -> None:
    """Let the links to pages of functions go to the functions; on the page as it is stored they name the file."""
    folder = "" if docname.startswith("reference/api/") else r"[\w./]*\bapi/"
    source[0] = re.sub(rf"\[`(?:distwrap\.)?(\w+)`\]\({folder}\w+\.md\)", _link_of, source[0])


def _link_of(found: re.Match[str]) -> str:
    is_public = found[1] in (*distwrap.__all__, "print")
    return f"{{py:obj}}`{found[1]} <distwrap.{found[1]}>`" if is_public else found[0]


def show_one_signature(app: Sphinx) -> None:
    """Let autodoc forget the overloads, of which `distributed` has three and `reduce` six."""
    for name in distwrap.__all__:
        module = getattr(getattr(distwrap, name), "__module__", None)
        if module is not None and module.startswith("distwrap."):
            analyzer = ModuleAnalyzer.for_module(module)
            analyzer.analyze()
            analyzer.overloads.clear()
            if name == "distributed":  # whose own signature, with each option, autodoc does not find in the source
                analyzer.overloads[name] = [inspect.signature(distwrap.distributed)]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("every-message", EveryMessage)
    app.connect("source-read", link_to_functions)
    app.connect("builder-inited", show_one_signature)
    return {"parallel_read_safe": True}
