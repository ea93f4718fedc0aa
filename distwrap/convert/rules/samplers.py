"""Replace torch's DistributedSampler by `shard_loader`, which sets epochs by itself."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.names import LOADER, SAMPLER
from distwrap.convert.script import argument, argument_node, constant, keywords_of, path_of


def shard_instead_of_sampling(conversion: Conversion) -> None:
    """Shard the loaders that have a DistributedSampler, and remove samplers that are not used otherwise."""
    script, facts = conversion.script, conversion.facts
    others = dict.fromkeys(script.calls(*SAMPLER))
    for loader in list(script.calls(*LOADER)):
        given = argument_node(loader, "sampler", 3)
        if given is None or not conversion.may_change(loader):
            continue
        sources = list(facts.values.sources(given.value))
        samplers = [each for each in sources if isinstance(each, cst.Call) and script.is_a(each, *SAMPLER)]
        if not samplers:
            continue
        for each in samplers:
            others.pop(each, None)
        if len(sources) != 1 or not _is_needless(conversion, samplers[0], loader):
            conversion.left(
                loader, "sampler", "the loader stays with its DistributedSampler, which fails in one process",
                "shard_loader(DataLoader(..., shuffle=True)), without a sampler",
            )  # fmt: skip
            continue
        _shard(conversion, loader, given, samplers[0])
    for each in others:
        conversion.left(
            each, "sampler", "it stays, since no loader that is seen takes it by itself, and fails in one process",
            "shard_loader(DataLoader(...)), without a sampler",
        )  # fmt: skip


def _is_needless(conversion: Conversion, sampler: cst.Call, loader: cst.Call) -> bool:
    """Return whether a sampler can be removed: it only shuffles, and all its uses can be converted."""
    script = conversion.script
    keywords = keywords_of(sampler.args)
    if not keywords <= {"shuffle", "num_replicas", "rank", "seed", "drop_last", "dataset"}:
        return False
    if ("shuffle" in keywords and constant(argument(sampler, "shuffle")) is ...) or constant(
        argument(sampler, "drop_last")
    ) not in (..., True, False):
        return False
    binding = script.assignment_of(sampler)
    if binding is None:  # made inside the loader's call
        return conversion.script.inside(sampler, loader) and all(
            _can_set(conversion, call, loader) for call in _set_epochs(conversion, None, loader)
        )
    path = path_of(binding.targets[0].target)
    loaders = [each for each in script.calls(*LOADER) if path_of(argument(each, "sampler", 3)) == path]
    for node in script.reads(path):
        above = script.parent(node)
        call = script.parent(above) if isinstance(above, (cst.Arg, cst.Attribute)) else None
        if isinstance(above, cst.Attribute) and above.attr.value == "set_epoch":
            if not isinstance(call, cst.Call) or not _can_set(conversion, call, loader):
                return False
        elif isinstance(call, cst.Call) and script.is_a(call, "builtins.len"):
            if _name_at(conversion, loader, node) is None:
                return False
        elif not any(script.inside(node, each) for each in loaders):
            return False
    return len(loaders) == 1 and all(
        _can_set(conversion, call, loader) for call in _set_epochs(conversion, path, loader)
    )


def _can_set(conversion: Conversion, call: cst.Call, loader: cst.Call) -> bool:
    """Return whether a ``set_epoch`` is not needed, or can be called on the loader instead."""
    is_needless = _counts_from_zero(conversion, call) and not _is_peeked(conversion, loader)
    return is_needless or _told(conversion, call, loader) is not None


def _told(conversion: Conversion, call: cst.Call, loader: cst.Call) -> str | None:
    """Return the loader's name at a call of ``set_epoch``, or None."""
    of = call.func.value if isinstance(call.func, cst.Attribute) else None
    if isinstance(of, cst.Attribute) and of.attr.value in ("sampler", "batch_sampler"):
        return conversion.script.code(of.value)
    return _name_at(conversion, loader, call)


def _name_at(conversion: Conversion, loader: cst.Call, node: cst.CSTNode) -> str | None:
    """Return a loader's name if it is the same at another piece of code, or None."""
    script, statement = conversion.script, conversion.script.assignment_of(loader)
    if statement is None:
        return None
    path, function = path_of(statement.targets[0].target), script.function_of(loader)
    if path is None:
        return None
    if path.startswith("self."):
        return path if script.class_of(node) is script.class_of(loader) else None
    found = conversion.facts.values.bound(node, path)
    is_same = len(found) == 1 and found[0].statement is statement
    return path if is_same and function in (None, script.function_of(node)) else None


def _is_peeked(conversion: Conversion, loader: cst.Call) -> bool:
    """Return whether a loader is iterated outside of a loop, as by ``next(iter(loader))``, which advances its epoch."""
    script = conversion.script
    for call in script.calls("builtins.iter"):
        if call.args and loader in conversion.facts.loader_of(call.args[0].value):
            return True
    return False


def _set_epochs(conversion: Conversion, path: str | None, loader: cst.Call) -> list[cst.Call]:
    """Return the calls of ``sampler.set_epoch`` and ``loader.sampler.set_epoch``."""
    found = []
    for call, attribute in conversion.script.method_calls("set_epoch"):
        of = attribute.value
        is_loaders = isinstance(of, cst.Attribute) and of.attr.value in ("sampler", "batch_sampler")
        if (path is not None and path_of(of) == path) or (
            is_loaders and isinstance(of, cst.Attribute) and loader in conversion.facts.loader_of(of.value)
        ):
            found.append(call)
    return found


def _counts_from_zero(conversion: Conversion, call: cst.Call) -> bool:
    """Return whether the epoch that is set is a loop index from 0, as a sharded loader counts by itself."""
    given = call.args[0].value if len(call.args) == 1 else None
    return given is not None and _is_number_of_turn(conversion, given)


def _is_number_of_turn(conversion: Conversion, given: cst.BaseExpression) -> bool:
    """Return whether an expression is a loop index from 0, directly or passed as an argument."""
    script, values = conversion.script, conversion.facts.values
    path, function = path_of(given), script.function_of(given)
    position = values.parameter(function, path or "")
    if function is not None and position is not None:
        position -= script.class_of(function) is not None
        handed = [argument(each, path or "", position) for each in values.callers(function)]
        return bool(handed) and all(each is not None and _is_number_of_turn(conversion, each) for each in handed)
    for each in script.ancestors(given):
        if isinstance(each, cst.For) and path is not None and path_of(each.target) == path:
            ranges = each.iter
            if not isinstance(ranges, cst.Call) or not script.is_a(ranges, "builtins.range"):
                return False
            return len(ranges.args) == 1 or (len(ranges.args) == 2 and constant(ranges.args[0].value) == 0)
    return False


def _shard(conversion: Conversion, loader: cst.Call, given: cst.Arg, sampler: cst.Call) -> None:
    script, edits = conversion.script, conversion.edits
    shuffles = constant(argument(sampler, "shuffle", 3)) is not False
    old = argument_node(loader, "shuffle", 2)
    if old is not None and shuffles:
        edits.remove_argument(loader, old)
    elif old is not None and constant(old.value) is not False:
        edits.replace(old.value, "False")
    if shuffles:
        edits.replace(given, "shuffle=True" + ("," if script.code(given).rstrip().endswith(",") else ""))
    else:
        edits.remove_argument(loader, given)
    options = ""
    seed = argument(sampler, "seed")
    if seed is not None:
        options += f", seed={script.code(seed)}"
    if constant(argument(sampler, "drop_last")) is True:
        options += ', mode="drop"'
    elif not shuffles:
        options += ', mode="pad"'
    if conversion.global_batch:
        options += ', batch_size="global"'
    conversion.wrap(loader, "shard_loader", options)
    conversion.done(loader, "shard_loader", "each rank gets its share, in the same order as of DistributedSampler")
    binding = script.assignment_of(sampler)
    path = path_of(binding.targets[0].target) if binding is not None else None
    for call in _set_epochs(conversion, path, loader):
        if _counts_from_zero(conversion, call) and not _is_peeked(conversion, loader):
            edits.remove(script.small_statement_of(call))
            conversion.done(call, "set-epoch", "epochs advance by themselves")
        else:
            edits.replace(call.func, f"{_told(conversion, call, loader)}.set_epoch")
            conversion.done(call, "set-epoch", "the loader is told the epoch, since it may not be the next one")
    for call in list(script.calls("builtins.len")):
        if path is not None and call.args and path_of(call.args[0].value) == path:
            edits.replace(call.args[0].value, f"{_name_at(conversion, loader, call)}.sampler")
            conversion.done(call, "sampler", "how many samples this rank has, as before")
    if binding is not None:
        edits.remove(binding)
        conversion.done(binding, "sampler", "the loader shuffles and shares by itself")
    if binding is not None and not _set_epochs(conversion, path, loader) and shuffles:
        conversion.done(loader, "set-epoch", "set_epoch was forgotten, so each epoch had one order; now they differ")
