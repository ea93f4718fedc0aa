"""Replace torch's DistributedSampler by `shard_loader`."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.names import LOADER, SAMPLER
from distwrap.convert.script import argument, argument_node, constant, keywords_of, path_of

_KNOWN = {"shuffle", "num_replicas", "rank", "seed", "drop_last", "dataset"}


def shard_instead_of_sampling(conversion: Conversion) -> None:
    """Shard the loaders that have a DistributedSampler, and remove samplers that are not used otherwise."""
    script = conversion.script
    others = dict.fromkeys(script.calls(*SAMPLER))
    for loader in list(script.calls(*LOADER)):
        given = argument_node(loader, "sampler", 3)
        sources = list(conversion.facts.values.sources(given.value)) if given is not None else []
        sampler = sources[0] if len(sources) == 1 else None
        if given is None or not isinstance(sampler, cst.Call) or sampler not in others:
            continue
        calls = _epochs(conversion, loader, sampler)
        if calls is not None and conversion.may_change(loader):
            others.pop(sampler)
            _shard(conversion, loader, given, sampler, calls)
    for each in others:
        conversion.todo(
            each, "sampler", "it stays, and fails in one process, as it is used for more than a loader and its epochs",
            "shard_loader(DataLoader(...)), without a sampler",
        )  # fmt: skip


def _epochs(conversion: Conversion, loader: cst.Call, sampler: cst.Call) -> dict[cst.Call, str] | None:
    """Return the calls of ``set_epoch`` with the loader's name there; None if the sampler cannot be removed."""
    script, facts = conversion.script, conversion.facts
    if not keywords_of(sampler.args) <= _KNOWN or constant(argument(sampler, "shuffle", 3) or cst.Name("True")) is ...:
        return None
    made, named = script.assignment_of(sampler), script.assignment_of(loader)
    path = path_of(made.targets[0].target) if made is not None else None
    name = path_of(named.targets[0].target) if named is not None else None
    found: dict[cst.Call, str] = {}
    for call, attribute in script.method_calls("set_epoch"):
        of = attribute.value
        if isinstance(of, cst.Attribute) and of.attr.value == "sampler" and loader in facts.loader_of(of.value):
            found[call] = script.code(of.value)
        elif path is not None and path_of(of) == path:
            is_seen = name is not None and any(each.value is loader for each in facts.values.bound(call, name))
            if not is_seen or name is None:
                return None
            found[call] = name
    if made is None:
        return found if script.inside(sampler, loader) else None
    reads = [each for each in script.reads(path) if not any(script.inside(each, call.func) for call in found)]
    return found if all(script.inside(each, loader) for each in reads) else None


def _shard(
    conversion: Conversion, loader: cst.Call, given: cst.Arg, sampler: cst.Call, calls: dict[cst.Call, str]
) -> None:
    script, edits = conversion.script, conversion.edits
    shuffles = constant(argument(sampler, "shuffle", 3)) is not False
    old, seed = argument_node(loader, "shuffle", 2), argument(sampler, "seed")
    if old is not None and shuffles:
        edits.remove_arguments(loader, [old])
    elif old is not None and constant(old.value) is not False:
        edits.replace(old.value, "False")
    if shuffles:
        edits.replace(given, "shuffle=True" + ("," if script.code(given).rstrip().endswith(",") else ""), drops=True)
    else:
        edits.remove_arguments(loader, [given])
    options = "" if seed is None else f", seed={script.code(seed)}"
    if constant(argument(sampler, "drop_last")) is True:
        options += ', mode="drop"'
    elif not shuffles:
        options += ', mode="pad"'
    conversion.wrap(loader, "shard_loader", options)
    conversion.done(loader, "shard_loader", "each rank gets its share, in the same order as of DistributedSampler")
    for call, name in calls.items():
        edits.replace(call.func, f"{name}.set_epoch")
        conversion.done(call, "set-epoch", "the loader is told the epoch")
    made = script.assignment_of(sampler)
    if made is not None:
        edits.remove(made)
