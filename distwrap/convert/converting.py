"""Convert a whole script: return the converted text and the notes for the user."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

import libcst as cst

from distwrap.convert.by_hand import refuse_other_libraries
from distwrap.convert.conversion import BY_HAND, Conversion, ConversionOptions
from distwrap.convert.findings import Notes
from distwrap.convert.imports import unbound_names, used_names, without_unused
from distwrap.convert.rules.ddp import convert_ddp, is_ddp
from distwrap.convert.rules.plain import convert_data_parallel, convert_plain, is_data_parallel
from distwrap.convert.rules.spawn import convert_spawn, is_spawn
from distwrap.convert.script import Script
from distwrap.errors import ConversionError

_OURS = ", so nothing is changed. This is an error of distwrap's: please report it with the script."


_Step = Callable[[Conversion], bool]
# Kinds of scripts, of which the first that applies is used: how one is known, how it is converted, and whether it must
# have a training loop; a script that starts ranks may train in another file.
_KINDS: tuple[tuple[_Step, _Step, bool], ...] = (
    (is_spawn, convert_spawn, False),
    (is_ddp, convert_ddp, False),
    (is_data_parallel, convert_data_parallel, True),
    (lambda conversion: True, convert_plain, True),
)


@dataclass(frozen=True)
class Converted:
    """Result of a conversion.

    Attributes:
        text: the converted script, or the script unchanged if nothing was done.
        notes: the notes for the user.
        is_result: whether the script was converted, or needs no conversion.
        command: the command that runs it on several ranks, without its name.
    """

    text: str
    notes: Notes
    is_result: bool
    command: str = "python"


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
    change, needs_loop = next((change, loop) for applies, change, loop in _KINDS if applies(conversion))
    if needs_loop and not conversion.facts.training_loops:
        conversion.unsure(
            script.tree, "loop", "there is no training loop that can be read: a for with .backward() and an "
            "optimizer's .step()", BY_HAND,
        )  # fmt: skip
        return Converted(script.text, conversion.notes, False)
    if not change(conversion):
        return Converted(script.text, _only_reasons(conversion), False)
    return Converted(_with_imports(conversion), conversion.notes, True, conversion.command())


def _with_imports(conversion: Conversion) -> str:
    """Return the edited text with the imports that it needs, and without imports that became unused.

    Raises:
        ConversionError: two edits overlap, or the edited text is not valid Python.
    """
    script, edits = conversion.script, conversion.edits
    without_import = edits.apply()
    _check(without_import, script.name)
    below = script.newline.join(conversion.below_imports)
    conversion.helpers.keep(used_names(f"{without_import}\n{below}\n"))
    conversion.helpers.add(edits, following=below)
    text = edits.apply()
    _check(text, script.name)
    text = without_unused(script.text, Script(text, script.name))
    _check(text, script.name)
    unknown = unbound_names(text) - unbound_names(script.text)
    if unknown:
        raise ConversionError(f"{script.name}: the converted script would not know {', '.join(unknown)}{_OURS}")
    return text


def _only_reasons(conversion: Conversion) -> Notes:
    """Return the notes without the changes, which were not made."""
    notes = Notes(conversion.script.text)
    for each in conversion.notes.of("todo", "left", "unsure"):
        notes.add(each.line, each.rule, each.why, each.fix, each.outcome)
    return notes


def _check(text: str, name: str) -> None:
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise ConversionError(
            f"{name}: the converted script would not be Python (line {error.lineno}: {error.msg}){_OURS}"
        ) from error
