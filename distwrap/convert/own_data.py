"""Find names and branches that depend on a rank's own data."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.facts import Loop, ScriptFacts
from distwrap.convert.names import CLOCKS_AND_DRAWS, COLLECTIVES, RANKS
from distwrap.convert.script import Script, path_of
from distwrap.convert.values import Binding


def own_names(script: Script, facts: ScriptFacts, loop: Loop) -> set[str]:
    """Return the names that a loop assigns, except its index, which is the same on all ranks."""
    index = None
    if (
        isinstance(loop, cst.For)
        and isinstance(loop.target, cst.Tuple)
        and script.is_a(loop.iter, "builtins.enumerate")
    ):
        index = path_of(loop.target.elements[0].value)
    elif isinstance(loop, cst.For) and script.is_a(facts.iterated(loop), "builtins.range", "itertools.count"):
        index = path_of(loop.target)
    function = script.function_of(loop)
    return {
        name
        for (scope, name), bindings in facts.values.bindings.items()
        if scope is function and name != index
        for each in bindings
        if script.inside(each.target, loop) and not _counts(each.statement) and not _is_alike(script, each)
    }


def _is_alike(script: Script, binding: Binding) -> bool:
    """Return whether a value comes from a collective, so that all ranks have the same."""
    made = binding.value or binding.unpacked
    return made is not None and any(script.names(call.func) & COLLECTIVES for call in script.find(cst.Call, made))


def _counts(statement: cst.CSTNode) -> bool:
    """Return whether a statement adds a literal integer, such as a step count, alike on all ranks."""
    return isinstance(statement, cst.AugAssign) and isinstance(statement.value, cst.Integer)


def is_of_own(script: Script, test: cst.CSTNode, own: set[str]) -> bool:
    """Return whether a test depends on a batch, the clock, a random number or the rank."""
    return bool({node.value for node in script.find(cst.Name, test)} & own) or any(
        name.startswith(CLOCKS_AND_DRAWS) or name in RANKS
        for call in script.find(cst.Call, test)
        for name in script.names(call.func)
    )


def own_branches(script: Script, facts: ScriptFacts) -> list[tuple[cst.CSTNode, cst.If]]:
    """Return each ``break``, ``continue`` or ``return`` of a training loop under a test that depends on own data."""
    found: list[tuple[cst.CSTNode, cst.If]] = []
    for each in facts.training_loops:
        own = own_names(script, facts, each.loop)
        for kind in (cst.Break, cst.Continue, cst.Return):
            for leave in script.find(kind, each.loop.body):
                test = next((above for above in script.ancestors(leave) if isinstance(above, cst.If)), None)
                inner = next(
                    (above for above in script.ancestors(leave) if isinstance(above, (cst.For, cst.While))), None
                )
                if test is None or inner is not each.loop or not script.inside(test, each.loop):
                    continue
                if is_of_own(script, test.test, own):
                    found.append((leave, test))
    return found
