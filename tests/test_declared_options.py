"""Options are declared once, as fields; what repeats them for people and type checkers agrees with the fields."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from distwrap import distributed
from distwrap.decorator import GivenOptions
from distwrap.options import DECLARATIONS, PATHS, SWITCHES, VARIABLES, Options

ROOT = Path(__file__).parents[1]
FIELDS = {field.name: field for field in dataclasses.fields(Options)}


def options_table() -> list[str]:
    """Return the lines of the table in docs/reference/options.md."""
    variables = {name: f"`{variable}`" for variable, name in VARIABLES.items()}
    lines = ["| option | default | variable | meaning |", "|---|---|---|---|"]
    for name, declared in DECLARATIONS.items():
        default = FIELDS[name].default
        default = int(default) if isinstance(default, float) else default
        shown = f'"{default}"' if isinstance(default, str) else repr(default)
        lines.append(f"| `{name}` | `{shown}` | {variables.get(name, '')} | {declared.line} |")
    lines += [f"| | | `{switch}=1` | {line} |" for switch, line in SWITCHES.items()]
    return [*lines, *(f"| | | `{variable}` | {line} |" for variable, line in PATHS.items())]


def test_types_of_the_decorator() -> None:
    """A type checker takes the options that there are; `returns` stands apart, as it decides the type of a call."""
    assert [*GivenOptions.__annotations__] == [name for name in FIELDS if name != "returns"]


def test_docstring_of_the_decorator() -> None:
    """It explains each option, in the order of the fields, and names each variable."""
    text = inspect.getdoc(distributed) or ""
    explained = re.findall(r"^    (\w+): ", text[text.index("Args:") : text.index("Returns:")], re.MULTILINE)
    assert explained == ["fn", *FIELDS]
    named = re.findall(r"``(?:DISTWRAP)?(_[A-Z_]+)(?:=1)?``", text[text.index("Environment:") :])
    assert {f"DISTWRAP{name}" for name in named} == {*VARIABLES, "DISTWRAP_DISABLE"}


def test_signature_in_the_docs() -> None:
    """docs/reference/options.md shows the options with their defaults."""
    found = re.search(r"`@distributed\((strategy=[^`]*)\)`", (ROOT / "docs" / "reference" / "options.md").read_text())
    assert found is not None
    shown = {name: value for name, _, value in (item.partition("=") for item in re.split(r",\s+", found[1]))}
    assert shown == {
        name: f'"{field.default}"' if isinstance(field.default, str) else f"{field.default!r}".removesuffix(".0")
        for name, field in FIELDS.items()
    }


def test_table_of_the_docs() -> None:
    """docs/reference/options.md has the table that the declarations make."""
    page = (ROOT / "docs" / "reference" / "options.md").read_text()
    assert "\n".join(options_table()) in page, "write this:\n" + "\n".join(options_table())


@pytest.mark.parametrize("name", FIELDS)
def test_defaults_are_accepted(name: str) -> None:
    """A default passes the option's own check, and comes out as it is."""
    assert DECLARATIONS[name].check(name, FIELDS[name].default) == FIELDS[name].default
