"""Check that documentation, changelog and docstrings agree with the code. Prints what does not, and exits with 1.

python docs/check.py

What needs no import of the package is checked by `python -m tests.house.check`.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import names  # the file beside this one

import distwrap
import distwrap.testing
from distwrap import errors, options, registry
from distwrap.cli import COMMANDS
from distwrap.environments import ranks

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference"
README_BYTES = 5 * 1024

# Functions without arguments, and classes that nobody makes: an example would say less than their first line.
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
    public = distwrap._PUBLIC
    yield from functions(public)
    yield from names_of_options()
    yield from variables_of_clusters()
    yield from errors_named()
    yield from messages_quoted()
    yield from names.check()
    yield from parts_and_commands()
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
    size = len((ROOT / "README.md").read_bytes())
    if size > README_BYTES:
        yield f"README.md has {size} bytes, more than {README_BYTES}: move something to docs/."


def functions(public: list[str]) -> Iterator[str]:
    """Yield where the index of functions, or the pages with their docstrings, differ from what is public."""
    folder = REFERENCE / "api"
    index = (folder / "index.md").read_text()
    yield from compare(
        "docs/reference/api/index.md's table of functions", table(index, "| function |"), "__all__", public
    )
    pages = {path.name: set(entries(path.read_text())) for path in folder.glob("*.md")}
    shown = [name for names in pages.values() for name in names]
    tested = [f"testing.{name}" for name in distwrap.testing.__all__]
    in_errors = [name for name in public if hasattr(errors, name)]  # docs/reference/errors.md has them
    wanted = [name for name in public if name not in in_errors] + tested
    yield from compare("The entries in docs/reference/api", shown, "the public names", wanted)
    for name, page in re.findall(r"\[`(\w+)`\]\((\w+\.md)", index):
        if name not in pages.get(page, ()):
            yield f"docs/reference/api/index.md says that {name} is in {page}, which has no entry of it."
    unlinked = set(wanted) - set(tested) - {name for name, _ in re.findall(r"\[`(\w+)`\]\((\w+\.md)", index)}
    if unlinked:
        yield f"docs/reference/api/index.md has no link for {', '.join(sorted(unlinked))}."


def names_of_options() -> Iterator[str]:
    """Yield where a table of launchers, strategies, algorithms, precisions or variables differs from the code's."""
    launchers = (REFERENCE / "launchers.md").read_text()
    choices = [name for name in distwrap.available_launchers() if name != "auto"]
    yield from compare("docs/reference/launchers.md", table(launchers, "| launcher |"), "the registry", choices)
    guide = table((ROOT / "docs" / "guides" / "communication.md").read_text(), "| `comm=` |")
    yield from compare("docs/guides/communication.md", guide, "the registry", distwrap.available_algorithms())
    for page, known in (
        ("launchers.md", registry.launchers),
        ("strategies.md", registry.strategies),
        ("algorithms.md", registry.algorithms),
        ("precisions.md", registry.precisions),
    ):
        text = (REFERENCE / page).read_text()
        for row in rows_of(known):
            if row not in text:
                yield f"docs/reference/{page} has no row that begins with {row}"
        for name in re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE):
            if name not in known.available():
                yield f"docs/reference/{page} has a row of {name}, which is not registered."
    named = re.findall(r"`(DISTWRAP_[A-Z_]+)", (REFERENCE / "options.md").read_text())
    yield from compare("docs/reference/options.md's variables", named, "the code's", options.KNOWN_VARIABLES)


def variables_of_clusters() -> Iterator[str]:
    """Yield which variables of launchers the package reads, and docs/reference/cluster_variables.md does not name."""
    read = {name for row in ranks.LAUNCHERS for name in row.names}
    for path in Path(ranks.__file__).parent.glob("*.py"):
        constants = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        texts = (str(node.value) for node in constants)
        read |= {text for text in texts if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|RANK", text)}
    parts = {row.names[0].removesuffix("_RANK") for row in ranks.LAUNCHERS}  # from which a row makes its names
    named = set(re.findall(r"`(\w+)`", (REFERENCE / "cluster_variables.md").read_text()))
    missing = read - parts - named - {"NODE_DETECTORS"}
    if missing:
        yield f"docs/reference/cluster_variables.md does not name {', '.join(sorted(missing))}."


def errors_named() -> Iterator[str]:
    """Yield where the page of errors lacks a class, or a page speaks of one that is not there."""
    page = (REFERENCE / "errors.md").read_text()
    classes = [
        name for name, kind in vars(errors).items() if inspect.isclass(kind) and kind.__module__ == errors.__name__
    ]
    sections = re.findall(r"^## (\w+(?:Error|Traceback))$", page, re.MULTILINE)
    yield from compare("The sections of docs/reference/errors.md", sections, "distwrap.errors", classes)
    theirs = ROOT / "docs" / "coming_from"  # which speaks of other packages' errors too
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if path.parent == theirs:
            continue
        for name in sorted(set(re.findall(r"`([A-Z][A-Za-z]+Error)`", path.read_text()))):
            if not hasattr(errors, name) and not hasattr(builtins, name):
                yield f"{path.relative_to(ROOT)} speaks of {name}, which distwrap.errors does not have."


def messages_quoted() -> Iterator[str]:
    """Yield which row of the page of errors quotes a message that the package does not have."""
    sys.path.insert(0, str(ROOT / "docs" / "_extension"))
    messages_of = importlib.import_module("messages").messages_of
    rows = re.findall(r"^\| `(\w+)`: (.+?) \|", (REFERENCE / "errors.md").read_text(), re.MULTILINE)
    quoted = [(name, words) for name, words in rows if hasattr(errors, name)]
    package = [path.read_text() for path in (ROOT / "distwrap").rglob("*.py")]
    texts = "\n".join([*package, *(text for name in dict(quoted) for text in messages_of(name))])
    for name, words in quoted:
        for part in filter(None, map(str.strip, words.split("…"))):
            if part not in texts:
                yield f"docs/reference/errors.md quotes a message of {name} that there is not: {part}"
    if not any("has got the same inputs on all" in text for text in messages_of("LoaderError")):
        yield "docs/reference/errors.md lacks messages that a function of the same file makes."


def parts_and_commands() -> Iterator[str]:
    """Yield where docs/explanation/architecture.md differs from the parts of a run, or from the commands."""
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    package = "\n".join(path.read_text() for path in (ROOT / "distwrap").rglob("*.py"))
    parts = re.findall(r"^class ([A-Za-z]\w*)\(.*\bRunPart\b", package, re.MULTILINE)
    named = [*table(page, "| part | room | keeps |")]
    named.remove("Activity")  # which is one by its methods
    yield from compare("docs/explanation/architecture.md's parts of a run", named, "the package's", parts)
    (row,) = re.findall(r"^\| `cli` \|.*: (.+) \|$", page, re.MULTILINE)
    yield from compare("docs/explanation/architecture.md's commands", row.split(", "), "cli's", COMMANDS)


def rows_of(known: registry.Registry[object]) -> Iterator[str]:
    """Yield how the row of each name begins in a reference page: its name, description and options."""
    for name, description in known.available().items():
        row = known._row(name)
        (place,) = row.factory if isinstance(row.factory, tuple) else (None,)
        if place is None or not place.startswith("distwrap."):
            continue  # of an installed package
        module, _, factory = place.partition(":")
        taken = inspect.signature(getattr(importlib.import_module(module), factory)).parameters
        yield f"| `{name}` | {description} | {shown(taken, row.defaults)} |"


def shown(taken: Mapping[str, inspect.Parameter], defaults: Mapping[str, object]) -> str:
    """Return the options of a factory as a page shows them, each with its default."""
    words = []
    for name, each in taken.items():
        if each.kind is each.VAR_KEYWORD:
            words.append("DDP's own" if name == "ddp_options" else "those of what it names")
        elif name in defaults or each.default is not each.empty:
            value = defaults.get(name, each.default)
            words.append(f"`{name}={value!r}`".replace("'", '"'))
        else:
            words.append(f"`{name}=`")
    return ", ".join(words)


def entries(text: str) -> Iterator[str]:
    """Yield the names for which a page has the docstring."""
    yield from re.findall(r"^\.\. auto(?:function|class|exception):: distwrap\.([\w.]+)", text, re.MULTILINE)


def table(text: str, head: str) -> list[str]:
    """List the names in the first column of the table that begins with `head`."""
    rows = text[text.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [name for row in rows for name in re.findall(r"`(\w+)", row.split("|")[1])]


def compare(left: str, ours: list[str], right: str, theirs: Iterable[str]) -> Iterator[str]:
    """Yield a sentence where two collections of names differ."""
    first, second = set(ours), set(theirs)
    if first != second:
        yield f"{left} and {right} differ: {', '.join(sorted(first ^ second))}."
    twice = sorted({name for name in ours if ours.count(name) > 1})
    if twice and "variables" not in left:
        yield f"{left} has twice: {', '.join(twice)}."


if __name__ == "__main__":
    found = list(problems())
    print("\n".join(found) or "Documentation, changelog and docstrings agree with the code.")
    sys.exit(bool(found))
