"""Find which loops go through a rank's share of a loader, and whether what they compute meets the other ranks."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from distwrap.convert.facts import Loop, ScriptFacts
from distwrap.convert.names import COLLECTIVES, SAMPLER
from distwrap.convert.script import Function, Script, argument, constant, is_about_rank, path_of
from distwrap.convert.values import Binding

_GIVES_BATCHES = ("distwrap.accumulate", "distwrap.lockstep", "builtins.list", "builtins.tuple")
SHAPES = ("shape", "dtype", "device", "size", "ndim", "dim", "numel", "append", "extend", "add", "update")
_SIZES = ("builtins.len", "builtins.type", "builtins.isinstance", "builtins.repr")
_ADDS = ("append", "extend", "add", "update")
_KNOWN = ("builtins.", "torch.", "numpy.", "math.", "statistics.", "distwrap.", "logging.", "os.", "sys.", "tqdm.")


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


def loader_in(facts: ScriptFacts, shard: cst.Call) -> cst.Call | None:
    """Return the ``DataLoader(...)`` that a call of ``shard_loader`` gets, or None if it cannot be seen."""
    given = argument(shard, "loader", 0)
    found = [each for each in facts.loader_of(given) if each is not None] if given is not None else []
    return found[0] if len(found) == 1 else None


def is_sharded_for(facts: ScriptFacts, loop: Loop, loader: cst.Call) -> bool:
    """Return whether what a loop iterates over is made of a loader by ``shard_loader``, by any of its names."""
    given = [argument(each, "loader", 0) for each in shards_of(facts, loop)]
    return any(each is not None and loader in facts.loader_of(each) for each in given)


# What meets the other ranks


def is_collective(script: Script, node: cst.CSTNode | None) -> bool:
    """Return whether a node is a call in which the ranks exchange something."""
    return isinstance(node, cst.Call) and bool(script.names(node.func) & COLLECTIVES)


def has_collective(facts: ScriptFacts, node: cst.CSTNode) -> bool:
    """Return whether a piece of code, or a function of the file that it calls, has a collective."""
    script = facts.script
    return any(
        is_collective(script, call) for body in (node, *facts.reached(node)) for call in script.find(cst.Call, body)
    )


def is_given_to_a_collective(script: Script, path: str, scope: cst.CSTNode) -> bool:
    """Return whether a collective in a scope gets a value with a name in it."""
    return any(
        is_collective(script, call)
        and any(name.value == path for arg in call.args for name in script.find(cst.Name, arg))
        for call in script.find(cst.Call, scope)
    )


def is_called_in_a_collective(facts: ScriptFacts, function: Function | None) -> bool:
    """Return whether a collective gets what a function returns."""
    calls = facts.values.callers(function) if function is not None else []
    return any(is_in_a_collective(facts.script, call) for call in calls)


def is_in_a_collective(script: Script, node: cst.CSTNode) -> bool:
    """Return whether a node is in the arguments of a collective."""
    return any(is_collective(script, each) for each in script.ancestors(node))


# What a loop computes


def accumulated(facts: ScriptFacts, loop: cst.For) -> dict[str, cst.BaseExpression]:
    """Return the names to which a loop adds what it computes of its batches, each with what is added."""
    script, found = facts.script, dict[str, cst.BaseExpression]()
    of_batch = batch_names(facts, loop)
    for added in script.find(cst.AugAssign, loop.body):
        path = path_of(added.target)
        if path is not None and isinstance(added.operator, cst.AddAssign) and _mentions(script, added.value, of_batch):
            found[path] = added.value
    for statement in script.find(cst.Expr, loop.body):
        call = statement.value
        if isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute) and call.func.attr.value in _ADDS[:3]:
            path = path_of(call.func.value)
            if path is not None and any(_mentions(script, arg, of_batch) for arg in call.args):
                found[path] = call.args[0].value
    function, start = script.function_of(loop), script.span(loop)[0]
    bindings = facts.values.bindings
    return {
        path: value
        for path, value in found.items()
        if any(script.span(each.target)[0] < start for each in bindings.get((function, path), []))
    }


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


def carriers(facts: ScriptFacts, function: Function | None, names: set[str]) -> set[str]:
    """Return the names of a function that hold something computed of some names."""
    script = facts.script
    bindings = {name: each for (scope, name), each in facts.values.bindings.items() if scope is function}
    found, known = set(names), -1
    while known < len(found):
        known = len(found)
        found = _spread(script, found, bindings)
        for call in script.find(cst.Call, function):
            of = path_of(call.func.value) if isinstance(call.func, cst.Attribute) else None
            adds = isinstance(call.func, cst.Attribute) and call.func.attr.value in _ADDS
            if of is not None and adds and any(_mentions(script, arg, found) for arg in call.args):
                found.add(of)
    return found


def meets_ranks(facts: ScriptFacts, function: Function | None, names: set[str]) -> bool:
    """Return whether a collective, or code that cannot be seen, gets one of some names in a function."""
    script = facts.script
    for call in script.find(cst.Call, function):
        if not any(_mentions(script, arg, names) for arg in call.args):
            continue
        if is_collective(script, call):
            return True
        known = facts.values.functions.get(path_of(call.func) or "")
        if known is not None:
            if has_collective(facts, known):
                return True
            continue
        full = script.names(call.func)
        is_method = isinstance(call.func, cst.Attribute) and not full
        if not is_method and not any(name.startswith(_KNOWN) for name in full) and not _is_local(facts, call):
            return True
    return False


def _is_local(facts: ScriptFacts, call: cst.Call) -> bool:
    """Return whether a call is of a value of the script, such as a model or a loss function."""
    path, function = path_of(call.func) or "", facts.script.function_of(call)
    is_parameter = facts.values.parameter(function, path) is not None
    return bool(facts.values.bound(call.func)) or path in facts.values.classes or is_parameter


def mentions_ranks(script: Script, node: cst.CSTNode) -> bool:
    """Return whether code mentions a rank or the number of ranks."""
    return is_about_rank(script.code(node)) or "world_size" in script.code(node)


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
