"""Branches that ranks may take differently: an early end of a loop, a skipped batch."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.facts import Loop
from distwrap.convert.own_data import is_of_own, own_branches, own_names
from distwrap.convert.script import path_of


def own_test(conversion: Conversion, node: cst.CSTNode, depth: int = 2) -> cst.If | None:
    """Return the test on a rank's own data that guards a piece of code, here or in a caller, or None."""
    script, facts = conversion.script, conversion.facts
    function = script.function_of(node)
    for test in script.ancestors(node):
        if test is function:
            break
        if isinstance(test, cst.If) and (
            any(
                script.inside(test, each.loop) and is_of_own(script, test.test, _of_batch(conversion, each.loop))
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
    """Return the names that a loop computes from its batch or from a wrapped model's output."""
    script, values = conversion.script, conversion.facts.values
    own = own_names(script, conversion.facts, loop)
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
    """Return whether a name holds a result of the rank's own share of the data, or is computed from one."""
    made = [each.value for each in conversion.facts.values.bound(name) if each.value is not None]
    return name in conversion.own_reads or any(
        inner in conversion.own_reads for value in made for inner in conversion.script.find(cst.Name, value)
    )


def agree_on_branches(conversion: Conversion) -> None:
    """Make all ranks leave a training loop or skip a batch together, if the test depends on own data."""
    script = conversion.script
    for each in conversion.facts.training_loops:
        if isinstance(each.loop, cst.While):
            own = own_names(script, conversion.facts, each.loop)
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
    """Return whether all ranks reach a test in each iteration: it stands directly in the loop's body."""
    script = conversion.script
    block = script.parent(test)
    return isinstance(block, cst.IndentedBlock) and isinstance(script.parent(block), (cst.For, cst.While))
