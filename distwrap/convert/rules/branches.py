"""Branches that ranks may take apart: an early end, a skipped batch."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.facts import Loop, ScriptFacts
from distwrap.convert.script import Script, path_of

_COUNTED = ("builtins.enumerate",)
_CLOCKS_AND_DRAWS = ("time.", "datetime.", "random.", "numpy.random.", "torch.rand")


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
                if _is_own(script, test.test, own):
                    found.append((leave, test))
    return found


def _is_own(script: Script, test: cst.CSTNode, own: set[str]) -> bool:
    """Return whether a test is of what a batch has given, of the clock, or of a number that is drawn."""
    return bool({node.value for node in script.find(cst.Name, test)} & own) or any(
        name.startswith(_CLOCKS_AND_DRAWS) for call in script.find(cst.Call, test) for name in script.names(call.func)
    )


def own_test(conversion: Conversion, node: cst.CSTNode, depth: int = 2) -> cst.If | None:
    """Return the test of a rank's own data under which a piece of code runs, by a caller's test too; or none."""
    script, facts = conversion.script, conversion.facts
    function = script.function_of(node)
    for test in script.ancestors(node):
        if test is function:
            break
        if isinstance(test, cst.If) and (
            any(
                script.inside(test, each.loop) and _is_own(script, test.test, _of_batch(conversion, each.loop))
                for each in facts.training_loops
                if script.function_of(each.loop) is function
                and next((up for up in script.ancestors(test) if isinstance(up, (cst.For, cst.While))), None)
                is each.loop
            )
            or any(_is_of_own_share(conversion, name) for name in script.find(cst.Name, test.test))
        ):
            return test
    callers = facts.values.callers(function) if function is not None and depth else []
    return next((found for call in callers if (found := own_test(conversion, call, depth - 1)) is not None), None)


def _of_batch(conversion: Conversion, loop: Loop) -> set[str]:
    """Return the names that a loop makes of its batch, or of what a wrapped model gives."""
    script, values = conversion.script, conversion.facts.values
    own = _own_names(script, conversion.facts, loop)
    target = loop.target if isinstance(loop, cst.For) else None
    found = own & {each.value for each in script.find(cst.Name, target)} if target is not None else set()
    known = -1
    while known < len(found):
        known = len(found)
        for name in own - found:
            for binding in values.bindings.get((script.function_of(loop), name), []):
                made = binding.value or binding.unpacked
                if made is None or not script.inside(binding.target, loop) or made in conversion.averaged:
                    continue
                parts = {path_of(each) for each in script.expressions(made)}
                if parts & (found | conversion.wrapped):
                    found.add(name)
    return found


def _is_of_own_share(conversion: Conversion, name: cst.Name) -> bool:
    """Return whether a name is read after a loop that set it by a rank's own share, or made of such a one."""
    made = [each.value for each in conversion.facts.values.bound(name) if each.value is not None]
    return name in conversion.own_reads or any(
        inner in conversion.own_reads for value in made for inner in conversion.script.find(cst.Name, value)
    )


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
