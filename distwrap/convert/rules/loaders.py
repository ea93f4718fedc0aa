"""Shard the loaders of training, and those of evaluations whose sums can be added up."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.names import BARS, CPU_SEEDS, DRAWS_OF_DATA, SEED_FUNCTIONS
from distwrap.convert.rules.metrics import Reading, read_loop
from distwrap.convert.rules.readers import (
    Reader,
    add_up_readings,
    give_own_loaders,
    note_handed_on,
    note_readers,
    readers_of,
)
from distwrap.convert.rules.sums import note_lengths
from distwrap.convert.script import argument, path_of


def shard_loaders(conversion: Conversion) -> None:
    """Shard the loaders of training, and those of evaluations whose results can be added up."""
    facts = conversion.facts
    training = [each for each in facts.loaders if each in facts.training_loaders and conversion.may_change(each)]
    readings = {
        loop: read_loop(conversion, loop, is_training=any(each.loop is loop for each in facts.training_loops))
        for loader in facts.loaders
        for loop in facts.loops_over(loader)
    }
    sharded = _sharded(conversion, training, readings)
    kept: set[cst.For] = set()
    exact: set[cst.For] = set()
    for loader in facts.loaders:
        if loader in sharded:
            readers = readers_of(conversion, loader, readings) if loader in training else []
            _shard(conversion, loader, readers, is_training=loader in training)
            kept |= {each.loop for each in readers if each.is_served and each.loop and each.share == "whole"}
            exact |= {each.loop for each in readers if each.is_served and each.loop and each.share == "exact"}
        elif loader not in facts.training_loaders:
            _leave(conversion, loader, readings)
    add_up_readings(conversion, readings, sharded, kept, exact)
    note_lengths(conversion, readings.values())
    for each in facts.training_loops:
        is_fed = each.loop in conversion.own_batches or any(facts.loader_of(facts.iterated(each.loop)))
        if not is_fed:
            conversion.left(
                each.loop, "shard_loader", "no DataLoader that can be seen feeds this loop; where every rank trains on "
                "the same, the run ends with an error", "shard_loader(DataLoader(...)), or split(batch)",
            )  # fmt: skip
    _look_at_seeds(conversion)


def _sharded(conversion: Conversion, training: list[cst.Call], readings: dict[cst.For, Reading]) -> set[cst.Call]:
    """Return the loaders that can be sharded: those of training, and those whose loops are all clear."""
    facts = conversion.facts
    sharded = {
        each for each in facts.loaders if conversion.may_change(each) and conversion.on_ranks(each)
    } - facts.training_loaders
    sharded |= set(training)
    changed = True
    while changed:
        changed = False
        for loader in sorted(sharded - set(training), key=conversion.script.span):
            loops = facts.loops_over(loader)
            shared = all(each in sharded for loop in loops for each in facts.loader_of(facts.iterated(loop)))
            if (
                not loops
                or not shared
                or not all(readings[loop].is_clear for loop in loops)
                or _other_use(conversion, loader)
            ):
                sharded.discard(loader)
                changed = True
    return sharded


def _other_use(conversion: Conversion, loader: cst.Call) -> bool:
    """Return whether a loader is used for more than loops, its length, its dataset, or as an argument."""
    script, values = conversion.script, conversion.facts.values
    for node in conversion.facts.mentions(loader):
        above = script.parent(node)
        if isinstance(above, cst.Attribute):
            if above.attr.value != "dataset":
                return True
        elif isinstance(above, cst.Arg):
            call = script.parent(above)
            name = path_of(call.func) if isinstance(call, cst.Call) else None
            is_method = (name or "").startswith("self.") or "." in (name or "")
            known = name in values.functions or name in values.classes or is_method
            if not known and not script.is_a(call, "builtins.len", "builtins.enumerate", *BARS):
                return True
        elif not isinstance(above, (cst.For, cst.Assign, cst.Return, cst.Element, cst.AnnAssign)):
            return True
    return False


def _shard(conversion: Conversion, loader: cst.Call, readers: list[Reader], *, is_training: bool) -> None:
    options = ', batch_size="global"' if conversion.global_batch else ""
    if not readers or not give_own_loaders(conversion, loader, readers, options):
        conversion.wrap(loader, "shard_loader", options)
        note_readers(conversion, readers)
    if is_training:
        note_handed_on(conversion, loader)
    if not is_training:
        why = "each rank evaluates its share, each sample once, and the sums are added up over the ranks"
    elif conversion.global_batch:
        why = "each rank trains on its share; the batch size is that of all ranks together, so the learning rate stays"
    else:
        why = (
            "each rank trains on its share, with batches of this size: a step sees as many times more samples as there "
            "are ranks, so look at the learning rate, or convert with --global-batch"
        )
    conversion.done(loader, "shard_loader", why)


def _leave(conversion: Conversion, loader: cst.Call, readings: dict[cst.For, Reading]) -> None:
    loops = conversion.facts.loops_over(loader)
    why = next((readings[loop].why for loop in loops if readings[loop].why), "its use is not clear")
    conversion.left(
        loader, "shard_loader", f"every rank goes through all of it, which is right but takes as long as in one "
        f"process: {why}", "shard_loader(...) here, and gather, mean or reduce for what its loop computes",
    )  # fmt: skip


def _look_at_seeds(conversion: Conversion) -> None:
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
                why = "unseeded, each rank would draw data of its own; seed=0 lets them draw alike"
                conversion.done(drawn, "seed", why)
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
