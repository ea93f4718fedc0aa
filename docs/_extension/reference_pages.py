"""Sphinx directives that write reference pages from the code.

``{every-message} ModelError`` lists each message with which the package raises this error, read from the source, so
that a search for a message finds the page. What a message fills in is shown as an ellipsis.

A link such as ``[`mean`](collectives.md)`` goes to the function itself, and not to the top of its page. A function has
one signature: the overloads are for type checkers.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from docutils import nodes
from messages import messages_of  # the file beside this one
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

import distwrap


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
    is_public = found[1] in distwrap._PUBLIC
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
