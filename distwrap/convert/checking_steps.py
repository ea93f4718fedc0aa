"""Find what makes a step on several ranks another one than in one process: its loss, its schedule, its closure."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from distwrap.convert.facts import Loop, ScriptFacts, TrainingLoop
from distwrap.convert.findings import Notes
from distwrap.convert.rules.hints import steps_by_loss
from distwrap.convert.rules.losses import SUM, WEIGHTED, WEIGHTS_FIX, is_sum, is_weighted
from distwrap.convert.script import argument, constant
from distwrap.convert.shares import batch_names, is_collective, is_shared, is_size, own_branches, own_names, shards_of


def losses(facts: ScriptFacts, notes: Notes) -> None:
    """Note losses that are no mean over the samples, where the ranks divide each batch."""
    script = facts.script
    for training in facts.training_loops:
        shards = shards_of(facts, training.loop)
        if not shards or not all(constant(argument(each, "batch_size")) == "global" for each in shards):
            continue
        for call, loss in backward_calls(facts, training):
            made = list(facts.values.sources(loss, returned=True))
            names = batch_names(facts, training.loop)
            if made and all(each is not None and is_sum(facts, each, names) for each in made):
                notes.add(script.line(call), "sum", SUM, f"({script.code(loss)} * world_size()).backward()")
            elif made and all(each is not None and is_weighted(facts, each) for each in made):
                notes.add(script.line(call), "sum", WEIGHTED, WEIGHTS_FIX)


def backward_calls(facts: ScriptFacts, training: TrainingLoop) -> Iterator[tuple[cst.Call, cst.BaseExpression]]:
    """Yield the calls that compute gradients in a training loop, each with the loss."""
    for call, attribute in facts.script.method_calls("backward", training.body):
        yield call, attribute.value
    for call in facts.script.calls("distwrap.backward", within=training.body):
        if call.args:
            yield call, call.args[0].value


def closures(facts: ScriptFacts, notes: Notes) -> None:
    """Note closures whose loss, of a batch of one rank's share, decides a step."""
    shared = [each.loop for each in facts.training_loops if is_shared(facts, each.loop)]
    for call in steps_by_loss(facts):
        if any(facts.script.inside(call, loop) for loop in shared):
            notes.add(
                facts.script.line(call), "closure", "LBFGS decides by the closure's loss how far it steps, so that "
                "ranks step apart", "return mean(loss) in the closure, the mean over the ranks",
            )  # fmt: skip


def branches(facts: ScriptFacts, notes: Notes) -> None:
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
