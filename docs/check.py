"""Check that README, changelog and docstrings agree with the code. Prints what does not, and exits with 1.

python docs/check.py
"""

from __future__ import annotations

import builtins
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import distwrap
from distwrap import errors, options

ROOT = Path(__file__).parent.parent

# They return one number of the surroundings, or nothing: an example would say less than their first line.
WITHOUT_EXAMPLE = {
    "CheckpointIO",
    "DistwrapError",
    "Strategy",
    "NodeSummary",
    "Preemption",
    "Placement",
    "barrier",
    "breakpoint_on",
    "is_rank_zero",
    "local_rank",
    "local_world_size",
    "node_rank",
    "rank",
    "Window",
    "teardown_process_group",
    "wait_for_saves",
    "world_size",
}


def problems() -> Iterator[str]:
    """Yield each disagreement in a sentence."""
    readme = (ROOT / "README.md").read_text()
    public = [name for name in [*distwrap.__all__, "print"] if name != "__version__"]
    yield from compare("README's table of functions", table(readme, "| function |"), "__all__", public)
    launchers = [name for name in distwrap.available_launchers() if name != "auto"]
    yield from compare("README's table of launchers", table(readme, "| launcher |"), "the registry", launchers)
    algorithms = table((ROOT / "docs" / "guides" / "communication.md").read_text(), "| `comm=` |")
    yield from compare("the table of algorithms", algorithms, "the registry", distwrap.available_algorithms())
    variables = {*options.VARIABLES, *options.SWITCHES, *options.CHOICES, *options.SECONDS_OF, *options.PATHS}
    yield from compare("README's variables", re.findall(r"`(DISTWRAP_[A-Z_]+)", readme), "the code's", variables)
    for name in re.findall(r"`([A-Za-z]+Error)`", readme):
        if not hasattr(errors, name) and not hasattr(builtins, name):
            yield f"README speaks of {name}, which distwrap.errors does not have."
    for name in public:
        docstring = inspect.getdoc(getattr(distwrap, name)) or ""
        if not docstring:
            yield f"{name} has no docstring."
        elif ">>>" not in docstring and name not in WITHOUT_EXAMPLE:
            yield f"{name}'s docstring has no example."
    if not re.search(
        rf"^## .*\b{re.escape(distwrap.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    ):
        yield f"CHANGELOG.md has no heading for version {distwrap.__version__}."


def table(text: str, head: str) -> list[str]:
    """List the names in the first column of the table that begins with `head`."""
    rows = text[text.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [name for row in rows for name in re.findall(r"`(\w+)", row.split("|")[1])]


def compare(left: str, ours: list[str], right: str, theirs: object) -> Iterator[str]:
    """Yield a sentence where two collections of names differ."""
    first, second = set(ours), set(theirs)  # type: ignore[call-overload]
    if first != second:
        yield f"{left} and {right} differ: {', '.join(sorted(first ^ second))}."


if __name__ == "__main__":
    found = list(problems())
    print("\n".join(found) or "README, changelog and docstrings agree with the code.")
    sys.exit(bool(found))
