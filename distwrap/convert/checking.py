"""Check a script for what goes wrong on several ranks: the line, the reason and the fix."""

from __future__ import annotations

from collections.abc import Callable

import libcst as cst

from distwrap.convert.facts import Loop, ScriptFacts
from distwrap.convert.findings import Notes
from distwrap.convert.names import AUGMENTING, COLLECTIVES, DATA_PARALLEL, INIT, SAMPLER, SEEDS, WRAPPER
from distwrap.convert.rules.hints import steps_by_loss
from distwrap.convert.rules.losses import backward_calls, wrong_losses
from distwrap.convert.script import Script, argument, constant, is_about_rank, path_of
from distwrap.convert.shares import (
    batch_names,
    is_called_in_a_collective,
    is_collective,
    is_in_a_collective,
    is_sharded_for,
    is_shared,
    is_size,
    own_branches,
    own_names,
    own_numbers,
    shards_of,
)
from distwrap.convert.values import root_of

_DISTWRAP = "distwrap."

Rule = Callable[[ScriptFacts, Notes], None]


def check(script: Script) -> Notes:
    """Return the problems that a script has on several ranks; empty if it never runs on several ranks.

    Example:
        >>> text = "import torch\\nmodel = torch.nn.DataParallel(torch.nn.Linear(1, 1))\\n"
        >>> [each.rule for each in check(Script(text))]
        ['data-parallel']
    """
    facts, notes = ScriptFacts(script), Notes(script.text)
    _data_parallel(facts, notes)
    _star_import(facts, notes)
    if is_for_ranks(script):
        for rule in RULES:
            rule(facts, notes)
    return notes


def is_for_ranks(script: Script) -> bool:
    """Return whether a script is written for several ranks, with torch's own functions or with distwrap."""
    return any(script.calls(*WRAPPER, *INIT, *SAMPLER)) or _uses_distwrap(script)


def _uses_distwrap(script: Script) -> bool:
    return any(name.startswith(_DISTWRAP) for call in script.find(cst.Call) for name in script.names(call.func)) or any(
        script.is_a(each.decorator, "distwrap.distributed") for each in script.find(cst.Decorator)
    )


def _data_parallel(facts: ScriptFacts, notes: Notes) -> None:
    for call in facts.script.calls(*DATA_PARALLEL):
        notes.add(
            facts.script.line(call), "data-parallel", "DataParallel copies the model at each step, and its threads "
            "wait for one interpreter", "wrap_model(model) under @distributed; convert does it",
        )  # fmt: skip


def _star_import(facts: ScriptFacts, notes: Notes) -> None:
    for imported in facts.script.find(cst.ImportFrom):
        if isinstance(imported.names, cst.ImportStar) and (path_of(imported.module) or "").startswith("distwrap"):
            notes.add(
                facts.script.line(imported), "star-import", "what a name means that comes by import * cannot be read "
                "from the script, so faults in its use are not found", "import the names: from distwrap import "
                "distributed, wrap_model, shard_loader",
            )  # fmt: skip


def _set_epoch(facts: ScriptFacts, notes: Notes) -> None:
    script = facts.script
    if any(script.method_calls("set_epoch")):
        return
    for call in script.calls(*SAMPLER):
        if constant(argument(call, "shuffle", 3)) is not False:
            notes.add(
                script.line(call), "set-epoch", "nothing calls set_epoch, so each epoch has the same order",
                "sampler.set_epoch(epoch) as each epoch begins, or shard_loader, whose epochs advance by themselves",
            )  # fmt: skip


def _module(facts: ScriptFacts, notes: Notes) -> None:
    script = facts.script
    for node in script.find(cst.Attribute):
        if node.attr.value != "module" or path_of(node) is None:
            continue
        sources = [each for each in facts.values.sources(node.value) if each is not None]
        if any(script.is_a(root_of(each), *WRAPPER, "distwrap.wrap_model") for each in sources):
            notes.add(
                script.line(node), "module", "a forward through .module skips the average, and a model that is in no "
                "wrapper has none", f"{path_of(node.value)} itself, with the model's names; or unwrap_model(...)",
            )  # fmt: skip


def _collective_on_one_rank(facts: ScriptFacts, notes: Notes) -> None:
    script = facts.script
    holders = {
        name
        for name, function in facts.values.functions.items()
        if any(script.names(call.func) & COLLECTIVES for call in script.find(cst.Call, function))
    }
    for branch in script.find(cst.If):
        if not is_about_rank(script.code(branch.test)) or "world_size" in script.code(branch.test):
            continue
        for call in script.find(cst.Call, branch.body):
            if script.names(call.func) & COLLECTIVES or path_of(call.func) in holders:
                notes.add(
                    script.line(call), "one-rank", "only some ranks come to this collective, and wait for the others "
                    "without end", "call it on every rank, and use its result under the condition",
                )  # fmt: skip


def _save_by_all(facts: ScriptFacts, notes: Notes) -> None:
    script = facts.script
    for call in script.calls("torch.save"):
        guarded = any(
            isinstance(each, (cst.If, cst.IfExp)) and is_about_rank(script.code(each.test))
            for each in script.ancestors(call)
        )
        function = script.function_of(call)
        by_caller = function is not None and _is_called_by_one_rank(facts, function)
        has_rank = is_about_rank(script.code(argument(call, "f", 1) or call))
        if not guarded and not by_caller and not has_rank:
            notes.add(
                script.line(call), "save", "all ranks write one file at a time, and may leave half of it",
                "save(state, path) of distwrap, on all ranks",
            )  # fmt: skip


def _is_called_by_one_rank(facts: ScriptFacts, function: cst.FunctionDef) -> bool:
    script = facts.script
    if any(script.is_a(_called(each.decorator), "distwrap.rank_zero_only") for each in function.decorators):
        return True
    calls = facts.values.callers(function)
    return bool(calls) and all(map(script.is_of_some_ranks, calls))


def _called(node: cst.BaseExpression) -> cst.BaseExpression:
    return node.func if isinstance(node, cst.Call) else node


def _seeds(facts: ScriptFacts, notes: Notes) -> None:
    """Note augmentation that is seeded alike on all ranks, and data that each rank draws without a seed."""
    script = facts.script
    augments = next(
        (
            call
            for call in script.find(cst.Call)
            if any(name.startswith(AUGMENTING) and "Random" in name for name in script.names(call.func))
        ),
        None,
    )
    seeds = list(script.calls(*SEEDS))
    sharded = any(script.calls("distwrap.shard_loader"))
    if augments is not None and not sharded:
        for call in seeds:
            given = call.args[0].value if call.args else None
            if given is not None and not is_about_rank(script.code(given)):
                notes.add(
                    script.line(call), "seed", "all ranks are seeded alike, so their augmentation draws alike",
                    "@distributed(seed=...) and shard_loader, whose samples have numbers of each rank's own",
                )  # fmt: skip
    seeded = seeds or any(script.calls("distwrap.seed_everything"))
    seeded = seeded or any(argument(call, "seed") is not None for call in script.calls("distwrap.distributed"))
    for call in script.calls("torch.utils.data.random_split"):
        if not seeded and argument(call, "generator", 2) is None:
            notes.add(
                script.line(call), "seed", "unseeded, each rank draws a split of its own, and trains on what "
                "others evaluate", "generator=torch.Generator().manual_seed(0), or seed= in the decorator",
            )  # fmt: skip


def _own_sums(facts: ScriptFacts, notes: Notes) -> None:
    """Note numbers that a loop over a share makes, and by which ranks decide, or that leave their function."""
    script = facts.script
    for loop in script.find(cst.For):
        if not is_shared(facts, loop) or is_called_in_a_collective(facts, script.function_of(loop)):
            continue
        for node, name, decides in own_numbers(facts, loop):
            notes.add(
                script.line(node), "own-sum", f"{name} is of this rank's share alone"
                + (", and ranks decide apart by it" if decides else ""),
                f'{name} = reduce({name}, op="sum") after the loop, or mean({name}, count)',
            )  # fmt: skip


def _own_sums_in_one_expression(facts: ScriptFacts, notes: Notes) -> None:
    """Note ``sum(….item() for … in loader)`` that is not added up over the ranks."""
    script = facts.script
    for call in script.calls("builtins.sum"):
        summed = call.args[0].value if call.args else None
        if not isinstance(summed, (cst.GeneratorExp, cst.ListComp)) or not any(script.method_calls("item", summed.elt)):
            continue
        if not is_shared(facts, summed.for_in) or is_in_a_collective(script, call):
            continue
        made = script.assignment_of(call)
        path = None if made is None else path_of(made.targets[0].target)
        function = script.function_of(call)
        reads = [node for node in script.reads(path, function) if is_in_a_collective(script, node)]
        if not reads and not is_called_in_a_collective(facts, function):
            notes.add(
                script.line(call), "own-sum", "this sum is of this rank's share alone",
                'reduce(sum(…), op="sum"), or mean(sum(…) / count, count)',
            )  # fmt: skip


def _sampler_and_shuffle(facts: ScriptFacts, notes: Notes) -> None:
    for call in facts.loaders:
        if argument(call, "sampler", 3) is not None and constant(argument(call, "shuffle", 2)) is True:
            notes.add(
                facts.script.line(call), "shuffle", "torch refuses a loader with both a sampler and shuffle=True",
                "shuffle=True alone, in shard_loader(...)",
            )  # fmt: skip


def _unshared_training(facts: ScriptFacts, notes: Notes) -> None:
    script = facts.script
    for each in facts.training_loops:
        for source in facts.values.sources(facts.iterated(each.loop), returned=True):
            if not isinstance(source, cst.Call) or source not in facts.loaders:
                continue
            plain = not any(argument(source, name) for name in ("sampler", "batch_sampler"))
            plain = plain and not is_sharded_for(facts, each.loop, source)
            if plain and not isinstance(script.parent(source), cst.Arg):
                notes.add(
                    script.line(source), "not-sharded", "every rank trains on all of this data, and does the work "
                    "of one process", "shard_loader(DataLoader(...))",
                )  # fmt: skip


def _losses(facts: ScriptFacts, notes: Notes) -> None:
    """Note losses that are no mean over the samples, where the ranks divide each batch."""
    script = facts.script
    for training in facts.training_loops:
        shards = shards_of(facts, training.loop)
        if not shards or not all(constant(argument(each, "batch_size")) == "global" for each in shards):
            continue
        for call, why, fix in wrong_losses(facts, training):
            notes.add(script.line(call), "sum", why, fix)


def _closures(facts: ScriptFacts, notes: Notes) -> None:
    """Note closures whose loss, of a batch of one rank's share, decides a step."""
    shared = [each.loop for each in facts.training_loops if is_shared(facts, each.loop)]
    for call in steps_by_loss(facts):
        if any(facts.script.inside(call, loop) for loop in shared):
            notes.add(
                facts.script.line(call), "closure", "LBFGS decides by the closure's loss how far it steps, so that "
                "ranks step apart", "return mean(loss) in the closure, the mean over the ranks",
            )  # fmt: skip


def _branches(facts: ScriptFacts, notes: Notes) -> None:
    """Note branches of a training loop that skip a batch, a gradient or the rest by a rank's own data."""
    script, others = facts.script, "lets the others wait, or averages its gradients with those of their next batch"
    for leave, test in own_branches(script, facts):
        what = "skips a batch" if isinstance(leave, cst.Continue) else "leaves the loop"
        if not _is_exchanged(facts, test.test):
            notes.add(
                script.line(test), "branch", f"a rank that {what} by its own data {others}",
                f'if agree({script.code(test.test)}, "any"):',
            )  # fmt: skip
    for training in facts.training_loops:
        for call, _ in backward_calls(facts, training) if is_shared(facts, training.loop) else ():
            above = (each for each in script.ancestors(call) if isinstance(each, (cst.If, cst.For, cst.While)))
            guard = next(above, None)
            if isinstance(guard, cst.If) and _is_of_batch(facts, guard, training.loop):
                notes.add(
                    script.line(guard), "branch", f"a rank that skips a backward by its own data {others}",
                    f'if agree({script.code(guard.test)}, "all"):',
                )  # fmt: skip


def _is_of_batch(facts: ScriptFacts, guard: cst.If, loop: Loop) -> bool:
    """Return whether an ``if`` without an ``else`` tests what its loop computes of a batch, more than its size."""
    script = facts.script
    own = batch_names(facts, loop) & own_names(script, facts, loop)
    tested = [
        each
        for each in script.find(cst.Name, guard.test)
        if each.value in own and not any(is_size(facts, above) for above in script.ancestors(each))
    ]
    is_alone = isinstance(script.parent(guard), cst.IndentedBlock) and guard.orelse is None
    return is_alone and bool(tested) and script.inside(guard, loop) and not _is_exchanged(facts, guard.test)


def _is_exchanged(facts: ScriptFacts, test: cst.CSTNode) -> bool:
    return any(is_collective(facts.script, call) for call in facts.script.find(cst.Call, test))


RULES: tuple[Rule, ...] = (
    _set_epoch, _module, _collective_on_one_rank, _save_by_all, _seeds, _own_sums, _own_sums_in_one_expression,
    _sampler_and_shuffle, _unshared_training, _branches, _losses, _closures,
)  # fmt: skip
