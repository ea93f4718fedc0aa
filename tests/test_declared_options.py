"""Options are declared once, as fields; what repeats them for people and type checkers agrees with the fields."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path
from typing import Any, get_args

import pytest

from distwrap import decorator, registry
from distwrap.decorator import GivenOptions
from distwrap.former_names import LAUNCHER_OF_STRATEGY
from distwrap.name_table import Registry
from distwrap.options import CHOICES, DECLARATIONS, NUMBERS, PATHS, SECONDS_OF, SWITCHES, VARIABLES, Options

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
    lines += [f"| | | `{variable}={word}` | {line} |" for variable, (word, line) in CHOICES.items()]
    return [
        *lines,
        *(f"| | | `{variable}` | {line} |" for variable, line in {**SECONDS_OF, **PATHS, **NUMBERS}.items()),
    ]


def test_types_of_the_decorator() -> None:
    """A type checker takes the options that there are; `returns` stands apart, as it decides the type of a call."""
    assert [*GivenOptions.__annotations__] == [name for name in FIELDS if name != "returns"]


def signatures() -> list[ast.arguments]:
    """Return the parameters of the overloads of `distributed` that list the options."""
    tree = ast.parse(inspect.getsource(decorator))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "distributed"]
    return [function.args for function in functions if function.args.kwonlyargs]


def test_signatures_of_the_decorator() -> None:
    """What an editor shows of `distributed(` has each option with its type and default."""
    types = {name: getattr(kind, "__forward_arg__", kind) for name, kind in GivenOptions.__annotations__.items()}
    assert len(signatures()) == len(["rank0", "all"])
    for arguments in signatures():
        assert [argument.arg for argument in arguments.kwonlyargs] == [*FIELDS]
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            shown = ast.unparse(argument.annotation or ast.Constant(None))
            if argument.arg == "returns":
                assert shown in ("Literal['rank0']", "Literal['all']")
                assert (default is None) is (shown == "Literal['all']")
            else:
                assert shown == types[argument.arg]
            if default is not None:
                assert ast.literal_eval(default) == FIELDS[argument.arg].default


@pytest.mark.parametrize(
    ("names", "table"),
    [
        (registry.StrategyName, registry.strategies),
        (registry.LauncherName, registry.launchers),
        (registry.PrecisionName, registry.precisions),
        (registry.AlgorithmName, registry.algorithms),
    ],
    ids=["strategies", "launchers", "precisions", "algorithms"],
)
def test_names_that_an_editor_offers(names: Any, table: Registry[Any]) -> None:
    """They are those of the table, and of strategies those with a launcher in them."""
    offered = {*get_args(names)}
    assert offered >= table._own
    assert offered - table._own <= ({*LAUNCHER_OF_STRATEGY} if table is registry.strategies else set())


def test_table_of_the_docs() -> None:
    """docs/reference/options.md has the table that the declarations make."""
    page = (ROOT / "docs" / "reference" / "options.md").read_text()
    assert "\n".join(options_table()) in page, "write this:\n" + "\n".join(options_table())


@pytest.mark.parametrize("name", FIELDS)
def test_defaults_are_accepted(name: str) -> None:
    """A default passes the option's own check, and comes out as it is."""
    assert DECLARATIONS[name].check(name, FIELDS[name].default) == FIELDS[name].default
