"""Say where the ranks begin: a function that holds the training gets the decorator, any other script stays flat."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.names import INIT
from distwrap.convert.script import Function, path_of


def choose_entry(conversion: Conversion, needed: Sequence[cst.CSTNode]) -> None:
    """Choose the function that the ranks run; without one they run the whole script.

    Args:
        conversion: the current conversion.
        needed: the code that the ranks must run.
    """
    entry = _function_of_all(conversion, needed)
    if entry is not None and not _is_plain(conversion, entry):
        entry = None
    conversion.begin_at(entry)


def write_entry(conversion: Conversion, needed: Sequence[cst.CSTNode]) -> None:
    """Decorate the chosen function, or set the group up at the top of a script that stays flat."""
    entry = conversion.entry
    if entry is not None:
        options = ", ".join(f"{key}={value}" for key, value in conversion.decorator_options.items())
        decorator = f"@{conversion.helpers.name('distributed')}" + (f"({options})" if options else "")
        conversion.edits.line_before(entry, decorator)
        conversion.done(entry, "entry", f"each rank runs {entry.name.value}(); a call returns rank 0's value")
        return
    script, guard = conversion.script, conversion.facts.guard
    calls = [] if any(script.calls(*INIT)) else [conversion.call("setup_process_group")]
    if "seed" in conversion.decorator_options:
        calls.append(conversion.call("seed_everything", conversion.decorator_options["seed"]))
    of_file = [each for each in needed if script.function_of(each) is None]
    if guard is None or not all(script.inside(each, guard) for each in of_file):
        conversion.below_imports += calls
    elif isinstance(guard.body, cst.IndentedBlock):
        for call in calls:
            conversion.edits.line_before(guard.body.body[0], call)
    else:
        conversion.edits.insert(script.span(guard.body.body[0])[0], "".join(f"{call}; " for call in calls))
    conversion.done(needed[0], "entry", f"each rank runs the whole script: {conversion.command()} {script.name}")


def _function_of_all(conversion: Conversion, needed: Sequence[cst.CSTNode]) -> Function | None:
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


def _is_plain(conversion: Conversion, function: Function) -> bool:
    """Return whether a function is neither async nor a generator, so that ranks can run it."""
    script = conversion.script
    yields = any(script.function_of(each) is function for each in script.find(cst.Yield, function))
    return function.asynchronous is None and not yields
