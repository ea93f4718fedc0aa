"""Find passes over loaders whose results are of one rank's share, or count samples more than once."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from distwrap.convert.facts import ScriptFacts
from distwrap.convert.findings import Notes
from distwrap.convert.names import LOADER
from distwrap.convert.script import Function, argument, constant, path_of
from distwrap.convert.shares import (
    SHAPES,
    accumulated,
    carriers,
    has_collective,
    is_called_in_a_collective,
    is_in_a_collective,
    is_shared,
    is_size,
    loader_in,
    meets_ranks,
    mentions_ranks,
    shards_of,
    sources_of_batches,
)


def own_shares(facts: ScriptFacts, notes: Notes) -> None:
    """Note passes over a rank's share that train nothing, and whose result is used without an exchange."""
    script = facts.script
    for node, names in _passes(facts):
        function = script.function_of(node)
        if _is_used(facts, function, names, script.span(node)[1]):
            notes.add(
                script.line(node), "own-share", "what is computed here is of this rank's share of the loader alone, "
                "and each rank has another one", "gather(...), reduce(...) or mean(...) of it; or a loader that is "
                "not sharded, which gives all ranks all samples",
            )  # fmt: skip


def repeated_samples(facts: ScriptFacts, notes: Notes) -> None:
    """Note sums of an evaluation over a shuffled share, where some samples come twice, by the dataset's length."""
    script = facts.script
    for loop in script.find(cst.For):
        loaders = [each for shard in shards_of(facts, loop) if (each := _repeating(facts, shard)) is not None]
        if not loaders or any(each.loop is loop for each in facts.training_loops):
            continue
        function = script.function_of(loop)
        sums = {path for path, added in accumulated(facts, loop).items() if not is_size(facts, added)}
        names = carriers(facts, function, sums)
        for divided, divisor in _divisions(facts, function):
            if not any(each.value in names for each in script.find(cst.Name, divided)):
                continue
            if _is_length_of_data(facts, divisor, loop, loaders):
                notes.add(
                    script.line(divisor), "repeated", "a shuffled share is filled up with samples that come twice, so "
                    "that the sum has more samples than the dataset", 'divide by a count of the samples, '
                    'reduce(count, op="sum"); or evaluate shard_loader(loader, mode="exact")',
                )  # fmt: skip


def whole_sums(facts: ScriptFacts, notes: Notes) -> None:
    """Note sums over a loader that is not sharded which are added up over the ranks."""
    script = facts.script
    for loop in script.find(cst.For):
        if any(each.loop is loop for each in facts.training_loops) or not _is_whole(facts, loop):
            continue
        function = script.function_of(loop)
        sums = set(accumulated(facts, loop))
        calls = list(script.calls("distwrap.reduce", "distwrap.gather", within=function))
        added = [call for call in calls if script.span(call)[0] > script.span(loop)[1]]
        added = [call for call in added if call.args and _adds_up(facts, call)]
        given = {call: _names_in(facts, call.args[0].value) & carriers(facts, function, sums) for call in added}
        given = {call: names for call, names in given.items() if names}
        if len({name for names in given.values() for name in names}) != 1:
            continue  # a count that is added up too makes the quotient right
        for call in given:
            if not mentions_ranks(script, script.small_statement_of(call)) and not _counts_too(facts, call):
                notes.add(
                    script.line(call), "whole-sum", "every rank goes through all of this loader, so that this has "
                    "each sample as many times as there are ranks", "shard_loader(loader), or no reduce and gather",
                )  # fmt: skip


def _passes(facts: ScriptFacts) -> Iterator[tuple[cst.CSTNode, set[str]]]:
    """Yield the passes over a share, each with the names that hold its result."""
    script = facts.script
    for loop in script.find(cst.For):
        if not is_shared(facts, loop) or _trains_or_ends(facts, loop) or mentions_ranks(script, loop.body):
            continue
        names = {
            path
            for path, added in accumulated(facts, loop).items()
            if not is_size(facts, added) and not any(script.method_calls("item", added))
        }
        if names:
            yield loop, names
    for inner in script.find(cst.CompFor):
        if is_shared(facts, inner) and not any(script.method_calls("item", script.parent(inner))):
            yield from _pass_in_expression(facts, inner)
    for call in script.calls("builtins.list", "builtins.tuple"):
        given = call.args[0].value if len(call.args) == 1 else None
        made = facts.values.sources(given, returned=True) if given is not None else ()
        if any(script.is_a(each, "distwrap.shard_loader") for each in made if isinstance(each, cst.Call)):
            yield from _pass_in_expression(facts, call)


def _pass_in_expression(facts: ScriptFacts, node: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, set[str]]]:
    script, statement = facts.script, facts.script.small_statement_of(node)
    if is_in_a_collective(script, node) or mentions_ranks(script, statement) or not isinstance(statement, cst.Assign):
        return
    whole = script.parent(node) if isinstance(node, cst.CompFor) else node
    if whole is not None and is_size(facts, whole):
        return
    names = {path for each in statement.targets for path in _paths(each.target)}
    if names:
        yield statement, names


def _paths(target: cst.CSTNode) -> Iterator[str]:
    parts = [each.value for each in target.elements] if isinstance(target, (cst.Tuple, cst.List)) else [target]
    yield from (path for each in parts if (path := path_of(each)) is not None)


def _is_used(facts: ScriptFacts, function: Function | None, names: set[str], end: int, depth: int = 3) -> bool:
    """Return whether a function or its callers use what some names hold, without an exchange of the ranks."""
    script = facts.script
    held = carriers(facts, function, names)
    if meets_ranks(facts, function, held) or is_called_in_a_collective(facts, function):
        return False
    reads = [
        node
        for node in script.find(cst.Name, function)
        if node.value in held and script.span(node)[0] >= end and not script.is_label(node)
    ]
    if any(_matters(facts, node) for node in reads):
        return True
    returned = any(isinstance(script.small_statement_of(node), cst.Return) for node in reads)
    if function is None or not returned or not depth:
        return False
    for call in facts.values.callers(function):
        statement = script.small_statement_of(call)
        paths = {path for each in getattr(statement, "targets", ()) for path in _paths(each.target)}
        used = _is_used(facts, script.function_of(call), paths, script.span(call)[1], depth - 1)
        if isinstance(statement, cst.Assign) and paths and used:
            return True
    return False


def _matters(facts: ScriptFacts, node: cst.Name) -> bool:
    """Return whether a read of a result decides something: in the training, in a test, or where it is saved."""
    script, statement = facts.script, facts.script.small_statement_of(node)
    above = script.parent(node)
    if isinstance(above, cst.Attribute) and above.value is node and above.attr.value in SHAPES:
        return False
    if any(is_size(facts, each) for each in script.ancestors(node)):
        return False
    if any(each.body is not None and script.inside(node, each.loop) for each in facts.training_loops):
        return True
    if isinstance(statement, (cst.If, cst.While)) and script.inside(node, statement.test):
        return not mentions_ranks(script, statement.test)
    calls = [each for each in script.ancestors(node) if isinstance(each, cst.Call)]
    return any(script.is_a(each, "distwrap.save", "torch.save", "distwrap.log") for each in calls)


def _trains_or_ends(facts: ScriptFacts, loop: cst.For) -> bool:
    """Return whether a loop trains, may end before all batches were seen, or exchanges something."""
    script = facts.script
    bodies = [loop, *facts.reached(loop.body)]
    calls = [call for body in bodies for call in script.find(cst.Call, body)]
    methods = {call.func.attr.value for call in calls if isinstance(call.func, cst.Attribute)}
    helpers = ("distwrap.backward", "distwrap.optimizer_step")
    return (
        bool(methods & {"backward", "step", "log"})
        or any(script.is_a(call, *helpers) for call in calls)
        or any(isinstance(each, (cst.Break, cst.Return, cst.Yield)) for each in script.nodes(loop.body))
        or has_collective(facts, loop.body)
    )


def _repeating(facts: ScriptFacts, shard: cst.Call) -> cst.Call | None:
    """Return the loader of a share in which some samples may come twice, or None."""
    mode, loader = argument(shard, "mode"), loader_in(facts, shard)
    if loader is None or (mode is not None and constant(mode) not in ("auto", "pad")):
        return None
    is_cut = constant(argument(loader, "drop_last", 8)) is True
    pads = constant(mode) == "pad" or constant(argument(loader, "shuffle", 2)) is True
    return loader if pads and constant(argument(loader, "shuffle", 2)) not in (None, False) and not is_cut else None


def _divisions(facts: ScriptFacts, function: Function | None) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
    for node in facts.script.nodes(function):
        if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Divide):
            yield node.left, node.right
        elif isinstance(node, cst.AugAssign) and isinstance(node.operator, cst.DivideAssign):
            yield node.target, node.value


def _is_length_of_data(facts: ScriptFacts, node: cst.CSTNode, loop: cst.For, loaders: list[cst.Call]) -> bool:
    """Return whether a divisor is ``len(loader.dataset)``, or ``len(data)`` of what a loader was made of."""
    script = facts.script
    if isinstance(node, cst.Name):
        made = [each.value for each in facts.values.bound(node)]
        return len(made) == 1 and made[0] is not None and _is_length_of_data(facts, made[0], loop, loaders)
    if not isinstance(node, cst.Call) or not script.is_a(node, "builtins.len") or len(node.args) != 1:
        return False
    given = node.args[0].value
    if isinstance(given, cst.Attribute) and given.attr.value == "dataset":
        holders = list(facts.values.sources(given.value, returned=True))
        return any(each in holders for each in (*loaders, *shards_of(facts, loop)))
    path = path_of(given)
    return path is not None and any(path_of(argument(each, "dataset", 0)) == path for each in loaders)


def _is_whole(facts: ScriptFacts, loop: cst.For) -> bool:
    """Return whether every rank goes through all of a loader in a loop."""
    script, sources = facts.script, sources_of_batches(facts, loop)
    if not sources or mentions_ranks(script, loop):
        return False
    for source in sources:
        if not isinstance(source, cst.Call) or not script.is_a(source, *LOADER) or mentions_ranks(script, source):
            return False
        data = argument(source, "dataset", 0)
        if data is None or any(argument(source, name) is not None for name in ("sampler", "batch_sampler")):
            return False
        if any(script.is_a(call, "distwrap.split", "distwrap.shard") for call in script.find(cst.Call, loop)):
            return False
        if not all(_is_of_torch(facts, each) for each in facts.values.sources(data, returned=True)):
            return False
    return True


def _is_of_torch(facts: ScriptFacts, made: cst.CSTNode | None) -> bool:
    """Return whether a dataset is one that divides nothing among ranks, as those of torch."""
    script = facts.script
    if made is None or mentions_ranks(script, made):
        return False
    names = script.names(made.func) if isinstance(made, cst.Call) else set()
    if any(name.startswith(("torch.", "torchvision.")) for name in names):
        return True
    owner = facts.values.classes.get(path_of(made.func) or "") if isinstance(made, cst.Call) else None
    return owner is not None and not mentions_ranks(script, owner)


def _adds_up(facts: ScriptFacts, call: cst.Call) -> bool:
    if facts.script.is_a(call, "distwrap.gather"):
        return True
    return bool(constant(argument(call, "op", 1)) == "sum")


def _counts_too(facts: ScriptFacts, call: cst.Call) -> bool:
    """Return whether a collective gets several values, so that a quotient of them is right."""
    return isinstance(call.args[0].value, (cst.Tuple, cst.List, cst.Dict))


def _names_in(facts: ScriptFacts, node: cst.CSTNode) -> set[str]:
    return {each.value for each in facts.script.find(cst.Name, node) if not facts.script.is_label(each)}
