"""Choose the function that the ranks run: decorate an existing one, or make one from the module level."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.main_guard import decorator, make_main, region_of
from distwrap.convert.script import Function, path_of


def choose_entry(conversion: Conversion, needed: Sequence[cst.CSTNode]) -> bool:
    """Choose the code that the ranks will run.

    Args:
        conversion: the current conversion.
        needed: the code that the ranks must run.

    Returns:
        Whether there is such a function, or one can be made; if not, the notes say why.
    """
    script, facts = conversion.script, conversion.facts
    entry = find_entry(conversion, needed)
    if entry is not None:
        conversion.reach.begin_at(entry)
        return True
    if any(script.function_of(each) is None for each in needed):
        conversion.reach.region = region_of(conversion, needed)
        return True
    loop = facts.training_loops[0].loop if facts.training_loops else needed[0]
    conversion.unsure(
        loop, "entry", "no function of this file holds the whole training: the model, the optimizer, the loader and "
        "the loop", "def main(): around the code that makes them and starts the training, and a call of main(); then "
        "convert again",
    )  # fmt: skip
    return False


def decorate_entry(conversion: Conversion, needed: Sequence[cst.CSTNode]) -> bool:
    """Put ``@distributed`` on the chosen function, or make one; return whether this succeeded."""
    if conversion.reach.entry is not None:
        return decorate(conversion, conversion.reach.entry)
    return make_main(conversion, needed) is not None


def find_entry(conversion: Conversion, needed: Sequence[cst.CSTNode]) -> Function | None:
    """Return the function that contains all of the training, preferably one called at module level, or None."""
    script, facts = conversion.script, conversion.facts
    holding = [each for each in facts.values.functions.values() if all(facts.holds(each, need) for need in needed)]
    started = [each for each in holding if _is_started(conversion, each)]
    if started:
        return started[0]
    if any(script.function_of(each) is None for each in needed):
        return None
    called = {other for each in holding for other in facts.reached(each)}
    outermost = [each for each in holding if each not in called]
    return outermost[0] if len(outermost) == 1 else None


def _is_started(conversion: Conversion, function: Function) -> bool:
    """Return whether a function is called, or passed to a call, at module level."""
    script = conversion.script
    return any(
        path_of(node) == function.name.value
        and script.function_of(node) is None
        and not isinstance(script.parent(node), (cst.FunctionDef, cst.Attribute))
        for node in script.find(cst.Name)
    )


def decorate(conversion: Conversion, entry: Function) -> bool:
    """Put the decorator directly above a function, below its existing ones."""
    script = conversion.script
    is_generator = any(script.function_of(each) is entry for each in script.find(cst.Yield, entry))
    if entry.asynchronous is not None or is_generator:
        conversion.unsure(entry, "entry", "an async function or a generator cannot be run by ranks", "a plain function")
        return False
    conversion.edits.line_before(entry, decorator(conversion))
    conversion.done(entry, "entry", f"each rank runs {entry.name.value}(); a call returns rank 0's value")
    return True
