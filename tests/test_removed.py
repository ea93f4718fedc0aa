"""Each row of REMOVED is shown to who still writes the name, wherever that may be."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distwrap import cli, distributed
from distwrap.errors import OptionError, RemovedError
from distwrap.former_names import REMOVED
from distwrap.options import Options
from distwrap.registry import strategies


def _run(command: str) -> None:
    cli.main([command])


def _import(function: str) -> None:
    exec(f"from distwrap import {function}")


# By kind: the error, and the ways to meet it.
WAYS: dict[str, tuple[type[BaseException], dict[str, Callable[[str], object]]]] = {
    "strategy": (
        OptionError,
        {
            "decorator": lambda name: distributed(strategy=name),
            "with options": lambda name: distributed(strategy=f"{name}(x=1)"),
            "environment": lambda name: Options().with_environment({"DISTWRAP_STRATEGY": name}),
            "wrap_model": strategies.make,
        },
    ),
    "launcher": (OptionError, {"decorator": lambda name: distributed(launcher=name)}),
    "algorithm": (OptionError, {"decorator": lambda name: distributed(comm=name)}),
    "function": (RemovedError, {"import": _import}),
    "option": (
        OptionError,
        {
            "decorator": lambda name: distributed(**{name: 1}),  # type: ignore[call-overload]
            "one call": lambda name: distributed(lambda: None).options(**{name: 1}),
            "environment": lambda name: Options().with_environment({f"DISTWRAP_{name.upper()}": "1"}),
            "strategy": lambda name: strategies.make(f"fsdp({name}=2)"),
        },
    ),
    "command": (SystemExit, {"command line": _run}),
}


CASES = [(kind, name, way) for kind, rows in REMOVED.items() for name in rows for way in WAYS[kind][1]]


@pytest.mark.parametrize(("kind", "name", "way"), CASES, ids=[" ".join(case) for case in CASES])
def test_the_row_is_shown(kind: str, name: str, way: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error of a name that is not here any more has its row; a command prints it, and ends with exit code 2."""
    expected, ways = WAYS[kind]
    with pytest.raises(expected) as caught:
        ways[way](name)
    if isinstance(caught.value, SystemExit):
        assert caught.value.code == 2
    assert REMOVED[kind][name] in f"{caught.value}{capsys.readouterr().err}"


def test_who_catches_an_import_error_catches_a_removed_function() -> None:
    """`try: from distwrap import …` with a way out goes on with an older or newer distwrap."""
    assert issubclass(RemovedError, ImportError)
