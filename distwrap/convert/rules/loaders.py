"""Shard the loaders of training, and those with a DistributedSampler; every rank goes through all of any other."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.names import BARS, CPU_SEEDS, DRAWS_OF_DATA, LOADER, SAMPLER, SEED_FUNCTIONS
from distwrap.convert.script import argument, argument_node, constant, keywords_of, path_of

_LOOKS = ("builtins.len", "builtins.enumerate", "builtins.iter", "builtins.zip", "builtins.print", *BARS)
_KEEPS_NO_SAMPLES = (cst.Assign, cst.AnnAssign, cst.Return, cst.Element, cst.DictElement, cst.For, cst.Attribute)
_SAMPLER_KEYWORDS = {"shuffle", "num_replicas", "rank", "seed", "drop_last", "dataset"}


def shard_loaders(conversion: Conversion) -> None:
    """Shard the loaders of training, and say of any other what the ranks do with it."""
    facts = conversion.facts
    fed = {each.loop: facts.loader_of(facts.iterated(each.loop)) or [None] for each in facts.training_loops}
    all_seen = not any(None in found for found in fed.values())
    for loader in facts.loaders:
        if loader in facts.training_loaders and conversion.may_change(loader):
            _shard(conversion, loader)
        elif conversion.on_ranks(loader) and all_seen:
            conversion.left(
                loader, "shard_loader", "every rank goes through all of it, which is right, and takes as long as in "
                "one process", "shard_loader(...), and reduce(total, op=\"sum\") or gather(...) of what its loop "
                "computes",
            )  # fmt: skip
    for loop, found in fed.items():
        if None in found:
            conversion.todo(
                loop, "shard_loader", "no loader is seen to feed this loop, and all ranks may train on the same",
                "shard_loader(loader), split(batch), or before it seed_everything(seed, apart=True)",
            )  # fmt: skip
    if any(
        "BatchNorm" in name for call in conversion.script.find(cst.Call) for name in conversion.script.names(call.func)
    ):
        for loop in [
            each
            for loader in facts.loaders
            if loader not in facts.training_loaders
            for each in facts.loops_over(loader)
        ]:
            conversion.todo(
                loop, "buffers", "each rank has BatchNorm statistics of its own", "sync_buffers(model) before this loop"
            )
    _seed_draws_of_data(conversion)


def _shard(conversion: Conversion, loader: cst.Call) -> None:
    script, facts = conversion.script, conversion.facts
    conversion.wrap(loader, "shard_loader", ', batch_size="global"' if conversion.global_batch else "")
    conversion.done(
        loader, "shard_loader", "each rank trains on its share; the batch size is that of all ranks together"
        if conversion.global_batch else "each rank trains on its share, with batches of this size: a step sees as many "
        "times more samples as there are ranks, so look at the learning rate, or convert with --global-batch",
    )  # fmt: skip
    training = [each.loop for each in facts.training_loops]
    for loop in facts.loops_over(loader):
        if loop not in training and not any(script.inside(each, loop) for each in training):
            _say_it_is_a_share(conversion, loop)
    for node in facts.mentions(loader):
        above = script.parent(node)
        call = script.parent(above) if isinstance(above, cst.Arg) else None
        name = path_of(call.func) or "" if isinstance(call, cst.Call) else ""
        is_known = name in facts.values.functions or name in facts.values.classes or name.startswith("self.")
        if not (isinstance(above, _KEEPS_NO_SAMPLES) or is_known or script.is_a(call, *_LOOKS)):
            _say_it_is_a_share(conversion, node)


def _say_it_is_a_share(conversion: Conversion, node: cst.CSTNode) -> None:
    conversion.todo(
        node, "shard_loader", "this sees the rank's share of the loader alone",
        "a second DataLoader for this, not sharded",
    )  # fmt: skip


def _seed_draws_of_data(conversion: Conversion) -> None:
    """Seed the ranks alike if a script draws its data or a split without a seed."""
    script = conversion.script
    seeded = {
        name.split(".")[0] if name in CPU_SEEDS else "all"
        for call in script.find(cst.Call)
        for name in (script.names(call.func) or {path_of(call.func) or ""})
        if (name in CPU_SEEDS or name.split(".")[-1] in SEED_FUNCTIONS) and not _is_conditional(conversion, call)
    }
    for drawn in script.calls(*DRAWS_OF_DATA):
        library = next(iter(script.names(drawn.func) & set(DRAWS_OF_DATA))).split(".")[0].replace("sklearn", "numpy")
        given = [argument(drawn, "generator"), argument(drawn, "random_state")]
        if seeded & {library, "all"} or any(each is not None for each in given) or not conversion.may_change(drawn):
            continue
        if conversion.on_ranks(drawn):
            if "seed" not in conversion.decorator_options:
                conversion.decorator_options["seed"] = "0"
                conversion.done(
                    drawn, "seed", "unseeded, each rank would draw data of its own; a seed lets them draw alike"
                )
        elif script.function_of(drawn) is None:
            conversion.left(
                drawn, "seed", "unseeded, and drawn before there are ranks, each of which may draw data of its own",
                "a seed above it, as torch.manual_seed(0)",
            )  # fmt: skip


def _is_conditional(conversion: Conversion, call: cst.Call) -> bool:
    """Return whether a script may skip a call, such as one under ``if args.seed is not None``."""
    tests = [each for each in conversion.script.ancestors(call) if isinstance(each, cst.If)]
    return any(
        each is not conversion.facts.guard and "is_available" not in conversion.script.code(each.test) for each in tests
    )


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
            _shard_as_sampled(conversion, loader, given, sampler, calls)
    for each in others:
        conversion.todo(
            each, "sampler", "it stays, and fails in one process, as it is used for more than a loader and its epochs",
            "shard_loader(DataLoader(...)), without a sampler",
        )  # fmt: skip


def _epochs(conversion: Conversion, loader: cst.Call, sampler: cst.Call) -> dict[cst.Call, str] | None:
    """Return the calls of ``set_epoch`` with the loader's name there; None if the sampler cannot be removed."""
    script, facts = conversion.script, conversion.facts
    if (
        not keywords_of(sampler.args) <= _SAMPLER_KEYWORDS
        or constant(argument(sampler, "shuffle", 3) or cst.Name("True")) is ...
    ):
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


def _shard_as_sampled(
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
