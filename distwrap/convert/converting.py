"""Convert a whole script: return the converted text and the notes for the user."""

from __future__ import annotations

import ast
from dataclasses import dataclass

import libcst as cst

from distwrap.convert.by_hand import refuse_other_libraries
from distwrap.convert.conversion import BY_HAND, Conversion, ConversionOptions
from distwrap.convert.findings import Notes
from distwrap.convert.folding import at_lines_of, folded
from distwrap.convert.imports import used_names, without_unused
from distwrap.convert.script import Script
from distwrap.convert.sources import SOURCES
from distwrap.errors import ConversionError


@dataclass(frozen=True)
class Converted:
    """Result of a conversion.

    Attributes:
        text: the converted script, or the script unchanged if nothing was done.
        notes: the notes for the user.
        is_result: whether the script was converted, or needs no conversion.
    """

    text: str
    notes: Notes
    is_result: bool


def convert(script: Script, options: ConversionOptions | None = None) -> Converted:
    """Convert a script, or leave it unchanged and say why.

    Raises:
        ConversionError: the script uses a library that is converted by hand, or two rules edit the same piece of text.

    Example:
        >>> convert(Script("print(3)")).is_result
        False
    """
    conversion = Conversion(script, options or ConversionOptions())
    for statement in (*script.find(cst.ImportFrom), *script.find(cst.Import)):
        if "distwrap" in script.code(statement).replace(".", " ").split():
            conversion.left(
                statement, "converted", "the script uses distwrap already, so it stays as it is",
                "python -m distwrap check looks for what may be missing",
            )  # fmt: skip
            return Converted(script.text, conversion.notes, True)
    refuse_other_libraries(script)
    text = folded(script)
    if text is not None and text != script.text:
        return _convert_folded(script, Script(text, script.name), options)
    source = next(each for each in SOURCES if each.applies(conversion))
    if source.needs_loop and not conversion.facts.training_loops:
        conversion.unsure(
            script.tree, "loop", "there is no training loop that can be read: a for with .backward() and an "
            "optimizer's .step()", BY_HAND,
        )  # fmt: skip
        return Converted(script.text, conversion.notes, False)
    if not source.convert(conversion):
        return Converted(script.text, _only_reasons(conversion), False)
    return Converted(_with_imports(conversion), conversion.notes, True)


def _convert_folded(script: Script, shorter: Script, options: ConversionOptions | None) -> Converted:
    """Convert a script without its branches for one process; the notes have the original line numbers."""
    result = convert(shorter, options)
    notes = at_lines_of(result.notes, script, shorter)
    notes.add(
        1, "branches", "where the script runs with ranks or without, the way with ranks stays: it does for one "
        "process too", outcome="done" if result.is_result else "left",
    )  # fmt: skip
    return Converted(result.text if result.is_result else script.text, notes, result.is_result)


def _with_imports(conversion: Conversion) -> str:
    """Return the edited text with the imports that it needs, and without imports that became unused.

    Raises:
        ConversionError: two edits overlap, or the edited text is not valid Python.
    """
    script, edits = conversion.script, conversion.edits
    without_import = edits.apply()
    _check(without_import, script.name)
    conversion.helpers.keep(used_names(f"{without_import}\n{conversion.below_imports}\n"))
    conversion.helpers.add(edits, following=conversion.below_imports)
    text = edits.apply()
    _check(text, script.name)
    text = without_unused(script.text, Script(text, script.name))
    _check(text, script.name)
    return text


def _only_reasons(conversion: Conversion) -> Notes:
    """Return the notes without the changes, which were not made."""
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
