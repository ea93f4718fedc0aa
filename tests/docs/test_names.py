"""The page about other packages' names speaks of functions and options that there are."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import distwrap
from distwrap.options import DECLARATIONS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "names.md"
# Of torch and Python, and methods of what distwrap's functions return.
OTHERS = {
    "del",
    "torch",
    "window",
    "model",
    "loader",
    "lambda",
    "wandb",
    "placement",
    "fn",
    "if",
    "python",
    "not",
    "stop",
}
OTHERS |= {
    "clip_grad_value_",
    "get_backend",
    "gethostname",
    "new_group",
    "GradScaler",
    "init",
    "empty",
    "compile",
    "skip",
}
OTHERS |= {"state_dict", "run_ranks", "empty_cache"}


def rows(text: str) -> Iterator[str]:
    """Yield the second column of each table."""
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| there"):
            yield line.split(" | ", 1)[1]


def calls(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the arguments of each call in a text's code."""
    for code in re.findall(r"`([^`]+)`", text):
        yield from re.findall(r"(\w+)\(([^()]*)", code)


def problems(text: str) -> list[str]:
    """List the functions and arguments that there are not."""
    found = []
    for name, arguments in (call for row in rows(text) for call in calls(row)):
        function = getattr(distwrap, name, None)
        if not callable(function):  # a module of the package
            function = None
        if function is None and name not in OTHERS:
            found.append(name)
        if function is None:
            continue
        known = {*DECLARATIONS} if name == "distributed" else {*inspect.signature(function).parameters}
        is_open = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(function).parameters.values())
        if name == "distributed" or not is_open:
            found += [f"{name}({word}=)" for word in re.findall(r"(\w+)=", arguments) if word not in known]
    return found


def test_the_names_of_this_package_are_there() -> None:
    """Each function that the page calls is public, and takes the arguments that the page gives it."""
    text = PAGE.read_text()
    assert len(list(rows(text))) > 90
    assert problems(text) == []


def test_a_wrong_name_would_be_seen() -> None:
    """The test above finds a function and an argument that there are not."""
    text = "| `x` | `gater(x)`, `gather(x, padding=0)`, `@distributed(procs=2)`, `gather(x)` |"
    assert problems(text) == ["gater", "gather(padding=)", "distributed(procs=)"]
