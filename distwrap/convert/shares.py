"""Find which loops go through a rank's share of a loader, and whether what they compute meets the other ranks."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from distwrap.convert.facts import Loop, ScriptFacts
from distwrap.convert.names import CLOCKS_AND_DRAWS, COLLECTIVES, RANKS, SAMPLER
from distwrap.convert.script import Function, Script, argument, constant, path_of
from distwrap.convert.values import Binding

_GIVES_BATCHES = ("distwrap.accumulate", "distwrap.lockstep", "builtins.list", "builtins.tuple")
SHAPES = ("shape", "dtype", "device", "size", "ndim", "dim", "numel", "append", "extend", "add", "update")
_SIZES = ("builtins.len", "builtins.type", "builtins.isinstance", "builtins.repr")
_ADDS = ("append", "extend", "add", "update")


def sources_of_batches(facts: ScriptFacts, loop: Loop | cst.CompFor) -> list[cst.BaseExpression | None]:
    """Return the expressions that may make what a loop iterates over; None stands for an unknown one."""
    node = facts.iterated(loop)
    while isinstance(node, cst.Call) and node.args and facts.script.is_a(node, *_GIVES_BATCHES):
        node = node.args[0].value
    return list(facts.values.sources(node, returned=True))


def is_shared(facts: ScriptFacts, loop: Loop | cst.CompFor) -> bool:
    """Return whether a loop iterates over this rank's share of a loader."""
    script = facts.script
    for source in sources_of_batches(facts, loop):
        if source is None:
            continue
        if script.is_a(source, "distwrap.shard_loader"):
            return constant(argument(source, "mode")) != "same" if isinstance(source, cst.Call) else True
        sampler = argument(source, "sampler") if isinstance(source, cst.Call) else None
        if sampler is not None and any(script.is_a(each, *SAMPLER) for each in facts.values.sources(sampler)):
            return True
    return False


def shards_of(facts: ScriptFacts, loop: Loop | cst.CompFor) -> list[cst.Call]:
    """Return the calls of ``shard_loader`` that may make the loader of a loop."""
    return [
        each
        for each in sources_of_batches(facts, loop)
        if isinstance(each, cst.Call) and facts.script.is_a(each, "distwrap.shard_loader")
    ]


def is_sharded_for(facts: ScriptFacts, loop: Loop, loader: cst.Call) -> bool:
    """Return whether what a loop iterates over is made of a loader by ``shard_loader``, by any of its names."""
    given = [argument(each, "loader", 0) for each in shards_of(facts, loop)]
    return any(each is not None and loader in facts.loader_of(each) for each in given)


# What meets the other ranks


def is_collective(script: Script, node: cst.CSTNode | None) -> bool:
    """Return whether a node is a call in which the ranks exchange something."""
    return isinstance(node, cst.Call) and bool(script.names(node.func) & COLLECTIVES)


def is_called_in_a_collective(facts: ScriptFacts, function: Function | None) -> bool:
    """Return whether a collective gets what a function returns."""
    calls = facts.values.callers(function) if function is not None else []
    return any(is_in_a_collective(facts.script, call) for call in calls)


def is_in_a_collective(script: Script, node: cst.CSTNode) -> bool:
    """Return whether a node is in the arguments of a collective."""
    return any(is_collective(script, each) for each in script.ancestors(node))


# What depends on a rank's own data


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
    within = [
        (name, each)
        for (scope, name), bindings in facts.values.bindings.items()
        if scope is script.function_of(loop) and name != index
        for each in bindings
        if script.inside(each.target, loop)
    ]
    alike = {name for name, each in within if _is_alike(script, each, set())}
    return {name for name, each in within if not _is_alike(script, each, alike)}


def _is_alike(script: Script, binding: Binding, alike: set[str]) -> bool:
    """Return whether a value is the same on all ranks: a collective's, or with a literal or such a value added."""
    if isinstance(added := binding.statement, cst.AugAssign):
        names = {each.value for each in script.find(cst.Name, added.value)}
        return isinstance(added.value, cst.Integer) or bool(names & alike)
    made = binding.value or binding.unpacked
    return made is not None and any(is_collective(script, call) for call in script.find(cst.Call, made))


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


# What a loop computes


def own_numbers(facts: ScriptFacts, loop: Loop) -> Iterator[tuple[cst.CSTNode, str, bool]]:
    """Yield where later code uses a number that a loop over a share makes, by its name.

    Each name comes at most once in a function, where it decides there or in a caller; else the first that is returned
    or printed.

    Returns:
        The place, the name or attribute, and whether the ranks decide by it.
    """
    yield from _uses(facts, facts.script.function_of(loop), _made_in(facts, loop), facts.script.span(loop)[1])


def _uses(
    facts: ScriptFacts, function: Function | None, own: set[str], end: int, depth: int = 2
) -> Iterator[tuple[cst.CSTNode, str, bool]]:
    script, noted = facts.script, False
    for node in script.nodes(function):
        if script.span(node)[0] < end or script.function_of(node) is not function:
            continue
        decided = next((each for each in _decides_by(facts, node) if each in own), None)
        if decided is not None:
            own = own - {decided}
            yield node, decided, True
        elif isinstance(node, cst.Return) or script.is_a(node, "builtins.print"):
            name = next((each for each in sorted(own) if _reads_own(script, each, node)), None)
            if name is not None and not noted:
                noted = True
                yield node, name, False
            if name is not None and isinstance(node, cst.Return) and function is not None and depth:
                for call in facts.values.callers(function):
                    given = _given(script, own, node, call)
                    inner = _uses(facts, script.function_of(call), given, script.span(call)[1], depth - 1)
                    yield from (each for each in inner if each[2])
        elif isinstance(node, cst.Assign) and not isinstance(node.value, (cst.Tuple, cst.List)):
            paths = {path for each in node.targets if (path := path_of(each.target)) is not None}
            is_own = any(_reads_own(script, each, node.value) for each in own)
            own = own | paths if is_own else own - paths


def _given(script: Script, own: set[str], returned: cst.Return, call: cst.Call) -> set[str]:
    """Return the names that a call's statement gives to what a function returns of some names."""
    assign = script.assignment_of(call)
    target, value = (assign.targets[0].target if assign is not None else None), returned.value
    pairs: list[tuple[cst.CSTNode | None, cst.CSTNode | None]] = [(target, value)]
    if isinstance(target, cst.Tuple) and isinstance(value, cst.Tuple):
        pairs = [(one.value, other.value) for one, other in zip(target.elements, value.elements, strict=False)]
    return {
        path
        for one, other in pairs
        if (path := path_of(one)) is not None and any(_reads_own(script, each, other) for each in own)
    }


def _reads_own(script: Script, path: str, within: cst.CSTNode | None) -> bool:
    """Return whether a piece of code reads a name, other than in the arguments of a collective."""
    return any(not is_in_a_collective(script, node) for node in script.reads(path, within))


def _made_in(facts: ScriptFacts, loop: Loop) -> set[str]:
    """Return the names and attributes that a loop makes of its batches: assigned, added to, appended to, updated."""
    found = own_names(facts.script, facts, loop)
    for node in facts.script.nodes(loop.body):
        if isinstance(node, cst.AugAssign) and constant(node.value) is ...:
            path = path_of(node.target) or ""
            found |= {path} if "." in path else set()  # own_names has the names
        elif isinstance(node, cst.Expr) and isinstance(node.value, cst.Call):
            call = node.value
            if isinstance(call.func, cst.Attribute) and call.func.attr.value in _ADDS and call.args:
                found.add(path_of(call.func.value) or "")
    return {each for each in found - {""} if "bar" not in each and "scaler" not in each.lower()}


def _decides_by(facts: ScriptFacts, node: cst.CSTNode) -> Iterator[str]:
    """Yield the names by which a node decides: a test, a scheduler's step, a minimum or maximum."""
    given: list[cst.CSTNode] = []
    if isinstance(node, (cst.If, cst.While, cst.IfExp)):
        given = [node.test]
    elif isinstance(node, cst.Call):
        steps = isinstance(node.func, cst.Attribute) and node.func.attr.value == "step"
        if (facts.script.is_a(node, "builtins.min", "builtins.max") and len(node.args) > 1) or (
            steps and isinstance(node.func, cst.Attribute) and facts.is_scheduler(node.func.value)
        ):
            given = list(node.args)
    for each in given:
        for one in facts.script.expressions(each):
            path = path_of(one)
            if path is not None and not is_in_a_collective(facts.script, one):
                yield path


def batch_names(facts: ScriptFacts, loop: Loop) -> set[str]:
    """Return the names that a loop gives to its batch, and to what it computes of it."""
    script, function = facts.script, facts.script.function_of(loop)
    target: cst.CSTNode | None = loop.target if isinstance(loop, cst.For) else None
    if isinstance(target, cst.Tuple) and isinstance(loop, cst.For) and script.is_a(loop.iter, "builtins.enumerate"):
        target = target.elements[-1].value
    found = {each.value for each in script.find(cst.Name, target)} if target is not None else set()
    inside = {
        name: [each for each in bindings if script.inside(each.target, loop)]
        for (scope, name), bindings in facts.values.bindings.items()
        if scope is function
    }
    return _spread(script, found, {name: each for name, each in inside.items() if each})


def is_size(facts: ScriptFacts, node: cst.CSTNode) -> bool:
    """Return whether an expression is a number of samples, or a shape."""
    script = facts.script
    if isinstance(node, (cst.ListComp, cst.GeneratorExp)):
        return is_size(facts, node.elt)
    if isinstance(node, cst.Subscript):
        return is_size(facts, node.value)
    if isinstance(node, cst.Attribute):
        return node.attr.value in SHAPES
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        return node.func.attr.value in ("size", "numel", "dim")
    return constant(node) is not ... or (isinstance(node, cst.Call) and script.is_a(node, *_SIZES))


def _spread(script: Script, names: set[str], bindings: dict[str, list[Binding]]) -> set[str]:
    found, known = set(names), -1
    while known < len(found):
        known = len(found)
        for name, given in bindings.items():
            if name not in found and any(_mentions(script, each, found) for one in given for each in _made_of(one)):
                found.add(name)
    return found


def _made_of(binding: Binding) -> Iterator[cst.CSTNode]:
    """Yield the expression of which an assignment makes its value."""
    made = binding.value or binding.unpacked
    if made is not None:
        yield made
    elif isinstance(binding.statement, cst.AugAssign):
        yield binding.statement.value
    elif isinstance(binding.statement, cst.For):
        yield binding.statement.iter


def _mentions(script: Script, node: cst.CSTNode, names: set[str]) -> bool:
    return any(each.value in names and not script.is_label(each) for each in script.find(cst.Name, node))
