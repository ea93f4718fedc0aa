"""Names of other packages: what stands beside them in the tables of pages are functions and options that there are."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import distwrap
from distwrap import former_names
from distwrap.options import DECLARATIONS

REFERENCE = Path(__file__).parent / "reference" / "names.md"
COMING_FROM = Path(__file__).parent / "coming_from"
PLANTED = "| `x` | `gater(x)`, `gather(x, padding=0)`, `@distributed(procs=2)`, `gather(x)` |"
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
# On the pages for those who come from another package: theirs, methods, and what comes from distwrap's modules.
CALLED = {"DataLoader", "DeepSpeedStrategy", "Net", "ddp", "deepspeed", "encode", "fsdp", "gathered_weights", "horovod"}
CALLED |= {"no_grad", "options", "pause", "range", "ray", "save_engine", "step", "train", "train_func", "training"}


def rows(text: str) -> Iterator[str]:
    """Yield the second column of each table."""
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| there"):
            yield line.split(" | ", 1)[1]


def calls(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the arguments of each call in a text's code."""
    for code in re.findall(r"`([^`]+)`", text):
        yield from re.findall(r"(\w+)\(([^()]*)", code)


def problems(text: str, others: set[str]) -> list[str]:
    """List the functions and arguments that there are not, but for functions of others."""
    found = []
    for name, arguments in (call for row in rows(text) for call in calls(row)):
        function = getattr(distwrap, name, None)
        if not callable(function):  # a module of the package
            function = None
        if function is None and name not in others:
            found.append(name)
        if function is None:
            continue
        known = {*DECLARATIONS} if name == "distributed" else {*inspect.signature(function).parameters}
        is_open = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(function).parameters.values())
        if name == "distributed" or not is_open:
            found += [f"{name}({word}=)" for word in re.findall(r"(\w+)=", arguments) if word not in known]
    return found


def check() -> Iterator[str]:
    """Yield what the pages name that there is not."""
    for path in (REFERENCE, *sorted(COMING_FROM.glob("*.md"))):
        others = OTHERS if path == REFERENCE else {*OTHERS, *CALLED}
        yield from (f"{path.name} names {each}, which there is not." for each in problems(path.read_text(), others))
    if problems(PLANTED, OTHERS) != ["gater", "gather(padding=)", "distributed(procs=)"]:
        yield "A wrong name on a page would not be seen."
    yield from strategies_of_lightning((COMING_FROM / "lightning.md").read_text())


def strategies_of_lightning(text: str) -> Iterator[str]:
    """Yield what the page about Lightning says of a strategy's name, and the code does not do."""
    for row in text[text.index("## Names of strategies") :].split("\n\n")[2].splitlines()[2:]:
        theirs, ours = ([part.strip('`"') for part in cell.split("`, ")] for cell in row.strip("| ").split(" | ")[:2])
        for name in theirs:
            launcher = former_names.LAUNCHER_OF_STRATEGY.get(name)
            became = former_names.BECAME.get(name, "ddp" if launcher and name.startswith("ddp_") else name)
            if became not in ours:
                yield f"lightning.md says that {name} becomes {ours}, and it becomes {became}."
