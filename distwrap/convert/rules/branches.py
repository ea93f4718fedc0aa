"""Branches that ranks may take apart: an early end, a skipped batch."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.facts import ScriptFacts
from distwrap.convert.script import Script, path_of


def own_branches(script: Script, facts: ScriptFacts) -> list[tuple[cst.CSTNode, cst.If]]:
    """Return each ``break``, ``continue`` or ``return`` of a training loop under a test of what the batch has given."""
    found: list[tuple[cst.CSTNode, cst.If]] = []
    for each in facts.training_loops:
        own = _own_names(script, facts, each.loop)
        for kind in (cst.Break, cst.Continue, cst.Return):
            for leave in script.find(kind, each.loop.body):
                test = next((above for above in script.ancestors(leave) if isinstance(above, cst.If)), None)
                inner = next(
                    (above for above in script.ancestors(leave) if isinstance(above, (cst.For, cst.While))), None
                )
                if test is None or inner is not each.loop or not script.inside(test, each.loop):
                    continue
                if {node.value for node in script.find(cst.Name, test.test)} & own:
                    found.append((leave, test))
    return found


def _own_names(script: Script, facts: ScriptFacts, loop: cst.For) -> set[str]:
    """Return the names to which a loop gives values, but for its index, which is the same on all ranks."""
    index = None
    if isinstance(loop.target, cst.Tuple) and script.is_a(loop.iter, "builtins.enumerate"):
        index = path_of(loop.target.elements[0].value)
    function = script.function_of(loop)
    return {
        name
        for (scope, name), bindings in facts.values.bindings.items()
        if scope is function and name != index
        for each in bindings
        if script.inside(each.target, loop)
        and not (isinstance(each.statement, cst.AugAssign) and _is_count(each.statement))
    }


def _is_count(statement: cst.AugAssign) -> bool:
    return isinstance(statement.value, cst.Integer)


def note_branches(conversion: Conversion) -> None:
    """Note where ranks may leave a training loop, or skip a batch, on their own, and then wait for each other."""
    for leave, test in own_branches(conversion.script, conversion.facts):
        what = "skips a batch" if isinstance(leave, cst.Continue) else "leaves the loop"
        conversion.left(
            test, "branch", f"a rank that {what} by its own data lets the others wait in the next exchange",
            f'if agree({conversion.script.code(test.test)}, "any"):',
        )  # fmt: skip
