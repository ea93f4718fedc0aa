"""Docstrings are plain English: a function's begins with a verb, a class's with a noun phrase; one word a concept."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.package import ROOT, trees

NO_BEGINNING = ("What", "How", "Of", "Those", "Where", "Our", "Which", "Whether", "Who")
# Old names of concepts, and the field's word for each.
REPLACED = {
    r"seals?|sealed": "signature, signed",
    r"(bread)?crumbs?": "activity",
    r"retold": "exception as JSON",
    r"homeward": "to the caller",
    r"echo(es)?": "secondary failure",
    r"who came": "registrations",
    r"machines?": "node",
}
# Where one computer is meant by itself, and not as one of a job.
MACHINES = (
    "machine that asks",
    "state machine",
    "azure/machine-learning",
    "machine code",
    "another machine",
    "one machine",
)
# What a function's docstring may not begin with, since it is no verb or the verb of a bystander.
NOT_IMPERATIVE = re.compile(r"(The|A|An|This|It|Its|In|At|On|By|With|For|From|Runs|Called|Is|Are|Has)\b")


def docstrings(all_trees: dict[Path, ast.Module]) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield the place, the node and the text of each docstring."""
    for path, tree in all_trees.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node)
                if text:
                    yield f"{path.name}:{node.body[0].lineno}", node, text


def offences(all_trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Yield each docstring that breaks a rule, with the rule."""
    for place, node, text in docstrings(all_trees):
        first = text.split()[0].rstrip(",.:;")
        of_attribute = isinstance(node, ast.FunctionDef) and _is_attribute(node)
        if first in NO_BEGINNING and not isinstance(node, ast.Module) and not (of_attribute and first == "Whether"):
            yield f"{place} begins with {first!r}: {text.splitlines()[0]}"
        elif isinstance(node, ast.ClassDef) and re.fullmatch(r"[A-Z][a-z]+(?<!s)s", first) and _is_verb(text):
            yield f"{place} begins a class with a verb: {text.splitlines()[0]}"
        elif isinstance(node, ast.FunctionDef) and not of_attribute and NOT_IMPERATIVE.match(text):
            yield f"{place} begins a function without an imperative verb: {text.splitlines()[0]}"
        for pattern, word in REPLACED.items():
            found = re.search(rf"\b({pattern})\b", text, re.IGNORECASE)
            if found and not any(allowed in text for allowed in MACHINES):
                yield f"{place} says {found[0]!r}, not {word!r}"


def _is_attribute(node: ast.FunctionDef) -> bool:
    """Tell whether a function is read as an attribute, whose docstring names the thing."""
    names = {getattr(each, "id", getattr(each, "attr", "")) for each in node.decorator_list}
    return bool(names & {"property", "cached_property", "fixture"})


def _is_verb(text: str) -> bool:
    """Tell whether a text begins as "Sees each operator", and not as "Words of a message"."""
    return re.match(r"\w+s (a|an|the|what|each|every|its|one|this|no|it|all|some|when|where)\b", text) is not None


def test_the_package_speaks_plainly() -> None:
    """No docstring of the package breaks a rule."""
    found = list(offences(trees()))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
)
def test_the_pages_use_one_word_a_concept(page: str) -> None:
    """The pages use the field's words too."""
    text = (ROOT / page).read_text()
    for pattern, word in REPLACED.items():
        if word != "node":
            assert not re.search(rf"\b({pattern})\b", text, re.IGNORECASE), f"{page}: {pattern}, not {word!r}"


@pytest.mark.parametrize(
    "code",
    [
        'class A:\n    """What a rank is told."""',
        'class A:\n    """Sees each operator."""',
        'def f():\n    """The number of ranks."""',
        'def f():\n    """Whether it runs."""',
        'def f():\n    """Return the seal of a message."""',
        'def f():\n    """Return how many machines there are."""',
    ],
)
def test_an_offence_would_be_seen(code: str) -> None:
    """The test above finds each kind of offence."""
    assert list(offences({Path("planted.py"): ast.parse(code)}))


def test_a_plain_docstring_is_no_offence() -> None:
    """Noun phrases of classes and attributes, and verbs of functions, break no rule."""
    code = (
        'class A:\n    """Words of a message."""\n    @property\n    def b(self):\n        """The number of ranks."""\n'
        '    def c(self):\n        """Return the number of ranks."""'
    )
    assert not list(offences({Path("planted.py"): ast.parse(code)}))
