"""Say what is not certain from the text: numbers of one rank, branches, closures, accumulation, precision, draws."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.facts import Loop, ScriptFacts
from distwrap.convert.names import AUTOCAST, DRAWS, DRAWS_IN_PLACE, SCALER
from distwrap.convert.own_data import own_branches, own_names
from distwrap.convert.script import argument, constant, path_of
from distwrap.convert.shares import is_collective

_ADDS = ("append", "extend", "add", "update")


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
    script, facts, function = conversion.script, conversion.facts, conversion.script.function_of(loop)
    own, end = _made_in(script.nodes(loop.body), conversion, loop), script.span(loop)[1]
    noted = False
    for node in script.nodes(function):
        if script.span(node)[0] < end or script.function_of(node) is not function:
            continue
        name = next((each for each in _decides_by(facts, node) if each in own), None)
        if name is not None:
            own -= {name}
            conversion.todo(
                node, "metric", f"{name} is of this rank's share, and ranks would decide apart",
                f"{name} = mean({name})",
            )  # fmt: skip
        elif not noted and (isinstance(node, cst.Return) or script.is_a(node, "builtins.print")):
            name = next((each for each in sorted(own) if any(script.reads(each, node))), None)
            noted = name is not None
            if name is not None:
                conversion.left(
                    node, "metric", f"{name} is of this rank's share, as a sum over a share is",
                    f"mean({name}, count) or reduce({name}, op=\"sum\") where a number of all ranks is wanted",
                )  # fmt: skip
        elif isinstance(node, cst.Assign) and not isinstance(node.value, (cst.Tuple, cst.List)):
            paths = {path for each in node.targets if (path := path_of(each.target)) is not None}
            is_own = any(any(script.reads(each, node.value)) for each in own)
            own = own | paths if is_own and not _is_exchanged(conversion, node.value) else own - paths


def _made_in(nodes: Iterator[cst.CSTNode], conversion: Conversion, loop: Loop) -> set[str]:
    """Return the names and attributes that a loop makes of its batches: assigned, added to, appended to, updated."""
    found = own_names(conversion.script, conversion.facts, loop)
    for node in nodes:
        if isinstance(node, cst.AugAssign) and constant(node.value) is ...:
            found.add(path_of(node.target) or "")
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
        yield from (path for one in facts.script.expressions(each) if (path := path_of(one)) is not None)


def _is_exchanged(conversion: Conversion, node: cst.CSTNode) -> bool:
    return any(is_collective(conversion.script, call) for call in conversion.script.find(cst.Call, node))


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
