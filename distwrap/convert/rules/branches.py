"""Branches that ranks may take apart: an early end, a skipped batch."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.facts import Loop, ScriptFacts
from distwrap.convert.script import Script, path_of

_COUNTED = ("builtins.enumerate",)


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


def _own_names(script: Script, facts: ScriptFacts, loop: Loop) -> set[str]:
    """Return the names to which a loop gives values, but for its index, which is the same on all ranks."""
    index = None
    if isinstance(loop, cst.For) and isinstance(loop.target, cst.Tuple) and script.is_a(loop.iter, *_COUNTED):
        index = path_of(loop.target.elements[0].value)
    elif isinstance(loop, cst.For) and script.is_a(facts.iterated(loop), "builtins.range", "itertools.count"):
        index = path_of(loop.target)
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


def agree_on_branches(conversion: Conversion) -> None:
    """Let all ranks together leave a training loop, or skip a batch, where each would do so by its own data."""
    script = conversion.script
    for each in conversion.facts.training_loops:
        if isinstance(each.loop, cst.While):
            own = _own_names(script, conversion.facts, each.loop)
            if {node.value for node in script.find(cst.Name, each.loop.test)} & own:
                conversion.left(
                    each.loop, "branch", "a rank whose loop ends by its own data takes fewer steps than the others, "
                    "which then wait for it", f'while agree({script.code(each.loop.test)}, "all"):',
                )  # fmt: skip
    for test in dict.fromkeys(test for _, test in own_branches(script, conversion.facts)):
        leaves = [each for each, other in own_branches(script, conversion.facts) if other is test]
        skips = all(isinstance(each, cst.Continue) for each in leaves)
        what = "skips a batch" if skips else "leaves the loop"
        if _comes_on_all_ranks(conversion, test) and conversion.may_change(test):
            conversion.wrap(test.test, "agree", ', "any"')
            conversion.done(test, "branch", f"all ranks together: each {what} where any of them does")
        else:
            conversion.left(
                test, "branch", f"a rank that {what} by its own data lets the others wait in the next exchange",
                f'if agree({script.code(test.test)}, "any"):',
            )  # fmt: skip


def _comes_on_all_ranks(conversion: Conversion, test: cst.If) -> bool:
    """Return whether each rank comes to a test in each turn of its loop, since the test stands in the loop's block."""
    script = conversion.script
    block = script.parent(test)
    return isinstance(block, cst.IndentedBlock) and isinstance(script.parent(block), (cst.For, cst.While))
