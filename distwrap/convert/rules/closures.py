"""Return the mean over the ranks from closures that an optimizer's step calls, as LBFGS decides by their loss."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.facts import ScriptFacts
from distwrap.convert.script import path_of
from distwrap.convert.shares import has_collective

_WHY = "decides by the closure's loss how far it steps, and how often it calls the closure, so that ranks step apart"


def average_closures(conversion: Conversion) -> None:
    """Let the closure of an optimizer that decides by its loss return the mean over the ranks."""
    script, facts = conversion.script, conversion.facts
    for call in steps_with_closures(facts):
        if not decides_by_loss(facts, call):
            if not isinstance(script.parent(call), cst.Expr):
                conversion.left(
                    call, "closure", "what this step returns is rank 0's own loss", "return mean(loss) in the closure"
                )
            continue
        returns = returns_of_closure(facts, call)
        values = [each.value for each in returns if each.value is not None]
        if not values or len(values) < len(returns) or not all(map(conversion.may_change, returns)):
            conversion.left(
                call, "closure", f"{path_of(call.func)} {_WHY}", "a closure that returns mean(loss), which is the "
                "mean over the ranks",
            )  # fmt: skip
            continue
        for value in values:
            if value not in conversion.averaged:
                conversion.averaged.add(value)
                conversion.wrap(value, "mean")
                conversion.done(
                    value, "closure", f"the loss is the mean over the ranks, since {path_of(call.func)} decides by it "
                    "how far it steps",
                )  # fmt: skip


def note_closures(facts: ScriptFacts) -> list[tuple[cst.CSTNode, str]]:
    """Return the steps that decide by a closure's loss of one rank, each with the reason why this is wrong."""
    found: list[tuple[cst.CSTNode, str]] = []
    for call in steps_with_closures(facts):
        function = closure_of(facts, call)
        if function is not None and decides_by_loss(facts, call) and not has_collective(facts, function):
            found.append((call, f"{path_of(call.func)} {_WHY}"))
    return found


def steps_with_closures(facts: ScriptFacts) -> list[cst.Call]:
    """Return the calls of ``step`` that get a closure."""
    steps = [
        call
        for call, attribute in facts.script.method_calls("step")
        if len(call.args) == 1 and not call.args[0].star and not facts.is_scheduler(attribute.value)
    ]
    return [call for call in steps if closure_of(facts, call) or isinstance(call.args[0].value, cst.Lambda)]


def closure_of(facts: ScriptFacts, call: cst.Call) -> cst.FunctionDef | None:
    """Return the function that a step gets by its name, or None."""
    script, name = facts.script, path_of(call.args[0].value)
    scopes = [script.function_of(call), None]
    fitting = [
        each for each in script.find(cst.FunctionDef) if each.name.value == name and script.function_of(each) in scopes
    ]
    return fitting[-1] if len(fitting) == 1 else None


def decides_by_loss(facts: ScriptFacts, call: cst.Call) -> bool:
    """Return whether an optimizer is, or may be, one that decides by the loss, as LBFGS is."""
    of = call.func.value if isinstance(call.func, cst.Attribute) else call.func
    names = {
        name
        for each in facts.values.sources(of, returned=True)
        for name in (facts.script.names(each.func) if isinstance(each, cst.Call) else {""})
    }
    return any(name.endswith("LBFGS") for name in names)


def returns_of_closure(facts: ScriptFacts, call: cst.Call) -> list[cst.Return]:
    """Return the statements by which a step's closure returns; empty if the closure cannot be seen."""
    function = closure_of(facts, call)
    found = facts.script.find(cst.Return, function) if function is not None else ()
    return [each for each in found if facts.script.function_of(each) is function]
