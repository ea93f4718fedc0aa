"""Say what is not certain from the text: numbers of one rank, branches, closures, accumulation, precision, draws."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.facts import Loop, ScriptFacts
from distwrap.convert.names import AUTOCAST, DRAWS, DRAWS_IN_PLACE, SCALER
from distwrap.convert.script import argument, path_of
from distwrap.convert.shares import is_collective, own_branches, own_names, own_numbers


def say_what_is_left(conversion: Conversion) -> None:
    """Write TODO lines where ranks would go apart, and notes where they only take longer."""
    for each in conversion.facts.training_loops:
        _numbers(conversion, each.loop)
        _accumulation(conversion, each.loop, each.step)
        _draws(conversion, each.loop, each.body)
    _branches(conversion)
    for call in steps_by_loss(conversion.facts):
        conversion.todo(
            call, "closure", "LBFGS decides by the closure's loss how far it steps, and ranks would step apart",
            "return mean(loss) in it",
        )  # fmt: skip
    for call in [*conversion.script.calls(*AUTOCAST), *conversion.script.calls(*SCALER)][:1]:
        conversion.left(
            call, "precision", "torch's autocast and scaler work as they are",
            "precision= in the decorator, with autocast(), backward(loss) and optimizer_step(optimizer)",
        )  # fmt: skip


def _numbers(conversion: Conversion, loop: Loop) -> None:
    """Say where a number that a loop over a share makes decides something, or leaves its function."""
    for node, name, decides in own_numbers(conversion.facts, loop):
        if decides:
            conversion.todo(
                node, "metric", f"{name} is of this rank's share, and ranks would decide apart",
                f"{name} = mean({name})",
            )  # fmt: skip
        else:
            conversion.left(
                node, "metric", f"{name} is of this rank's share, as a sum over a share is",
                f"mean({name}, count) or reduce({name}, op=\"sum\") where a number of all ranks is wanted",
            )  # fmt: skip


def _accumulation(conversion: Conversion, loop: Loop, step: cst.CSTNode) -> None:
    """Note a loop that steps every few batches."""
    script = conversion.script
    for branch in script.ancestors(step):
        if isinstance(branch, cst.If) and script.inside(branch, loop) and any(script.find(cst.Modulo, branch.test)):
            conversion.left(
                loop, "accumulate", "it steps every few batches, and exchanges gradients in each, which is right but "
                "slower", "for batch, window in accumulate(loader, steps, model)",
            )  # fmt: skip
            return


def _draws(conversion: Conversion, loop: Loop, body: cst.CSTNode) -> None:
    """Say where a loop's own lines draw tensors of random numbers, of which each rank's model is to get others."""
    script, facts = conversion.script, conversion.facts
    for call in (*script.find(cst.Call, loop), *script.find(cst.Call, body)):
        method = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
        drawn = [name for name in script.names(call.func) & DRAWS if name.startswith("torch.")]
        if argument(call, "generator") is None and (drawn or method in DRAWS_IN_PLACE) and not _is_unfed(facts, loop):
            conversion.todo(
                call, "draws", "all ranks draw the same here",
                "seed_everything(seed, apart=True) once the models and the data are made",
            )  # fmt: skip
            return


def _is_unfed(facts: ScriptFacts, loop: Loop) -> bool:
    """Return whether no loader feeds a loop, which is said already."""
    return not any(facts.loader_of(facts.iterated(loop)))


def _branches(conversion: Conversion) -> None:
    """Let all ranks leave a training loop or skip a batch together, if the test depends on a rank's own data."""
    script, facts = conversion.script, conversion.facts
    for each in facts.training_loops:
        own = own_names(script, facts, each.loop)
        if isinstance(each.loop, cst.While) and {node.value for node in script.find(cst.Name, each.loop.test)} & own:
            conversion.todo(
                each.loop, "branch", "a rank whose loop ends by its own data lets the others wait",
                f'while agree({script.code(each.loop.test)}, "all"):',
            )  # fmt: skip
    for test in dict.fromkeys(test for _, test in own_branches(script, facts)):
        block = script.parent(test)
        comes = isinstance(block, cst.IndentedBlock) and isinstance(script.parent(block), (cst.For, cst.While))
        if comes and conversion.may_change(test):  # on all ranks, in each turn
            conversion.wrap(test.test, "agree", ', "any"')
            conversion.done(test, "branch", "all ranks leave the loop or skip the batch where any of them does")
        else:
            conversion.todo(
                test, "branch", "a rank that leaves by its own data lets the others wait",
                f'if agree({script.code(test.test)}, "any"):',
            )  # fmt: skip


def steps_by_loss(facts: ScriptFacts) -> list[cst.Call]:
    """Return the steps of LBFGS with a closure that does not return a mean over the ranks."""
    script, found = facts.script, []
    for call, attribute in script.method_calls("step"):
        made = [each for each in facts.values.sources(attribute.value, returned=True) if isinstance(each, cst.Call)]
        name = path_of(call.args[0].value) if len(call.args) == 1 else None
        closures = [each for each in script.find(cst.FunctionDef) if each.name.value == name]
        meets = any(is_collective(script, one) for each in closures for one in script.find(cst.Call, each))
        if call.args and not meets and any("LBFGS" in full for each in made for full in script.names(each.func)):
            found.append(call)
    return found
