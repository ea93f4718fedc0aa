"""A whole conversion: a script in, the converted text and the list for the user out."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

import libcst as cst

from distwrap.convert.conversion import Conversion, Wishes
from distwrap.convert.findings import Notes
from distwrap.convert.folding import at_lines_of, folded
from distwrap.convert.imports import used_names, without_unused
from distwrap.convert.script import Script
from distwrap.convert.sources.accelerate import convert_accelerate, is_accelerate
from distwrap.convert.sources.data_parallel import convert_data_parallel, is_data_parallel
from distwrap.convert.sources.ddp import convert_ddp, is_ddp
from distwrap.convert.sources.fabric import convert_fabric, is_fabric
from distwrap.convert.sources.horovod import convert_horovod, is_horovod
from distwrap.convert.sources.plain import BY_HAND, convert_plain
from distwrap.convert.sources.spawn import convert_spawn, is_spawn
from distwrap.errors import ConversionError

Source = tuple[Callable[[Conversion], bool], Callable[[Conversion], bool]]
SOURCES: tuple[Source, ...] = (
    (is_accelerate, convert_accelerate),
    (is_fabric, convert_fabric),
    (is_horovod, convert_horovod),
    (is_spawn, convert_spawn),
    (is_ddp, convert_ddp),
    (is_data_parallel, convert_data_parallel),
)


@dataclass(frozen=True)
class Converted:
    """Result of a conversion.

    Attributes:
        text: the converted script; the script as it was, where nothing was done.
        notes: the list for the user.
        is_result: whether there is a result: a converted script, or one that needs no conversion.
    """

    text: str
    notes: Notes
    is_result: bool


def convert(script: Script, wishes: Wishes | None = None) -> Converted:
    """Convert a script, or leave it as it is and say why.

    Raises:
        ConversionError: rules want the same piece of text.

    Example:
        >>> convert(Script("print(3)")).is_result
        False
    """
    conversion = Conversion(script, wishes or Wishes())
    for statement in (*script.find(cst.ImportFrom), *script.find(cst.Import)):
        if "distwrap" in script.code(statement).replace(".", " ").split():
            conversion.left(
                statement, "converted", "the script uses distwrap already, so it stays as it is",
                "python -m distwrap check looks for what may be missing",
            )  # fmt: skip
            return Converted(script.text, conversion.notes, True)
    text = folded(script)
    if text is not None and text != script.text:
        shorter = Script(text, script.name)
        result = convert(shorter, wishes)
        notes = at_lines_of(result.notes, script, shorter)
        notes.add(
            1, "branches", "where the script runs with ranks or without, the way with ranks stays: it does for one "
            "process too", outcome="done" if result.is_result else "left",
        )  # fmt: skip
        return Converted(result.text if result.is_result else script.text, notes, result.is_result)
    source = next((found for applies, found in SOURCES if applies(conversion)), convert_plain)
    if not conversion.facts.training_loops and source not in (convert_spawn, convert_ddp):
        conversion.unsure(
            script.tree, "loop", "there is no training loop that can be read: a for with .backward() and an "
            "optimizer's .step()", BY_HAND,
        )  # fmt: skip
        return Converted(script.text, conversion.notes, False)
    if not source(conversion):
        return Converted(script.text, _only_reasons(conversion), False)
    without_import = conversion.edits.apply()
    _check(without_import, script.name)
    conversion.helpers.keep(used_names(f"{without_import}\n{conversion.below_imports}\n"))
    conversion.helpers.add(conversion.edits, following=conversion.below_imports)
    text = conversion.edits.apply()
    _check(text, script.name)
    text = without_unused(script.text, Script(text, script.name))
    _check(text, script.name)
    return Converted(text, conversion.notes, True)


def _only_reasons(conversion: Conversion) -> Notes:
    """Return the list without what would have been done, since nothing was."""
    notes = Notes(conversion.script.text)
    for each in conversion.notes.of("left", "unsure"):
        notes.add(each.line, each.rule, each.why, each.fix, each.outcome)
    return notes


def _check(text: str, name: str) -> None:
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise ConversionError(
            f"{name}: the converted script would not be Python (line {error.lineno}: {error.msg}), so nothing is "
            f"changed. This is an error of distwrap's: please report it with the script."
        ) from error
