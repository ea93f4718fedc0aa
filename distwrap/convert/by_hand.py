"""Refuse scripts with Accelerate, Lightning Fabric or Horovod, which are converted by hand: name the page for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from distwrap.convert.script import Script, path_of
from distwrap.errors import ConversionError


class Library(NamedTuple):
    """A library whose scripts are converted by hand.

    Attributes:
        name: its name, for the message.
        page: the page in ``docs/coming_from`` that has the table of its calls.
        modules: full names of its modules and objects; a script that has one of them, or a part of it, is refused.
        hint: the most common replacements.
    """

    name: str
    page: str
    modules: tuple[str, ...]
    hint: str


LIBRARIES = (
    Library(
        "Accelerate", "accelerate.md", ("accelerate",),
        "@distributed on the function that trains, wrap_model(model) and shard_loader(loader) for "
        "accelerator.prepare(...), loss.backward() for accelerator.backward(loss)",
    ),
    Library(
        "Lightning Fabric", "fabric.md", ("lightning.fabric", "lightning.Fabric", "lightning_fabric"),
        "@distributed on the function that trains, wrap_model(model) for fabric.setup(model, optimizer), "
        "shard_loader(loader) for fabric.setup_dataloaders(loader), loss.backward() for fabric.backward(loss)",
    ),
    Library(
        "Horovod", "horovod.md", ("horovod",),
        "@distributed on the function that trains in the place of hvd.init(), wrap_model(model) before the optimizer "
        "is made in the place of hvd.DistributedOptimizer and the broadcasts, shard_loader(loader) for the sampler",
    ),
)  # fmt: skip


def refuse_other_libraries(script: Script) -> None:
    """Raise an error for a script that imports one of the libraries.

    Raises:
        ConversionError: the script imports one; the message names the page to convert it by.

    Example:
        >>> refuse_other_libraries(Script("import lightning as L"))  # which is no Fabric
    """
    for node, full in _full_names(script):
        for library in LIBRARIES:
            if any(f"{full}.".startswith(f"{module}.") for module in library.modules):
                raise ConversionError(
                    f"{script.name}, line {script.line(node)}: this script uses {library.name}, and convert does not "
                    f"rewrite {library.name}. Convert it by hand, with the table in docs/coming_from/{library.page}: "
                    f"{library.hint}."
                )


def _full_names(script: Script) -> Iterator[tuple[cst.CSTNode, str]]:
    """Yield what a script imports, and attributes of imported modules, each by its full name."""
    for plain in script.find(cst.Import):
        yield from ((plain, path_of(each.name) or "") for each in plain.names)
    for statement in script.find(cst.ImportFrom):
        if not statement.relative:
            module = path_of(statement.module) or ""
            if isinstance(statement.names, cst.ImportStar):
                parts = script.bound_names
            else:
                parts = {path_of(each.name) or "" for each in statement.names}
            yield from ((statement, f"{module}.{part}") for part in parts)
    for attribute in script.find(cst.Attribute):
        yield from ((attribute, full) for full in script.names(attribute))
