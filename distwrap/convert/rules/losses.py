"""Note losses that are no mean over the samples of a batch, where the ranks divide the batch."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.facts import ScriptFacts
from distwrap.convert.script import argument, constant, keyword_of, path_of
from distwrap.convert.shares import batch_names

_WEIGHTED = ("cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss")
SUM = (
    "the loss is a sum over a rank's part of the batch, and gradients are averaged over the ranks, so they are as many "
    "times less as there are ranks"
)
WEIGHTED = (
    "with class weights the mean is over the weights in a rank's part of the batch, and the ranks' parts have other "
    "sums of weights"
)
WEIGHTS_FIX = 'scale_loss(loss_sum, weights[targets].sum()).backward(), with reduction="sum" for loss_sum'


def note_losses(conversion: Conversion) -> None:
    """Note losses whose gradients differ from those of one process, where a batch is divided among the ranks."""
    script, facts = conversion.script, conversion.facts
    for each in facts.training_loops:
        if not conversion.global_batch:
            return
        names = batch_names(facts, each.loop)
        for call, attribute in script.method_calls("backward", each.body):
            sources = list(facts.values.sources(attribute.value, returned=True))
            if any(source is not None and is_sum(facts, source, names) for source in sources):
                conversion.left(call, "sum", SUM, f"({script.code(attribute.value)} * world_size()).backward()")
            elif any(source is not None and is_weighted(facts, source) for source in sources):
                conversion.left(call, "sum", WEIGHTED, WEIGHTS_FIX)


def is_sum(facts: ScriptFacts, node: cst.BaseExpression, of_batch: set[str], depth: int = 3) -> bool:
    """Return whether a loss is surely a sum over its batch, and not divided or scaled afterwards.

    Args:
        facts: facts about the script.
        node: the expression of the loss.
        of_batch: names that hold the batch or something computed of it.
        depth: the maximum number of steps to follow.
    """
    script = facts.script
    if isinstance(node, cst.BinaryOperation):
        if not isinstance(node.operator, (cst.Add, cst.Subtract)) or not depth:
            return False
        parts = [one for side in (node.left, node.right) for one in facts.values.sources(side, returned=True)]
        return any(each is not None and is_sum(facts, each, of_batch, depth - 1) for each in parts)
    if not isinstance(node, cst.Call):
        return False
    summed = _is_sum_of(facts, node)
    if summed is None:
        return _asks_for_sum(facts, node)
    is_joined = any(script.is_a(each, "torch.stack", "torch.cat") for each in script.find(cst.Call, summed))
    return not is_joined and any(each.value in of_batch for each in script.find(cst.Name, summed))


def is_weighted(facts: ScriptFacts, node: cst.BaseExpression) -> bool:
    """Return whether a loss is a mean with class weights, which divides by the sum of the weights of its samples."""
    if not isinstance(node, cst.Call):
        return False
    made = [each for each in facts.values.sources(node.func) if isinstance(each, cst.Call)]
    for call in (node, *made):
        names = {name.split(".")[-1] for name in facts.script.names(call.func) if name.startswith("torch.")}
        position = None if any(name[0].isupper() for name in names) else 2
        weight = argument(call, "weight", 0 if position is None else position)
        reduction = constant(argument(call, "reduction"))
        if names & set(_WEIGHTED) and weight is not None and constant(weight) is not None:
            return reduction in (..., "mean") if argument(call, "reduction") is not None else True
    return False


def _asks_for_sum(facts: ScriptFacts, node: cst.Call) -> bool:
    """Return whether a loss function, or the object that is called, has ``reduction="sum"``."""
    made = (
        [each for each in facts.values.sources(node.func) if isinstance(each, cst.Call)] if path_of(node.func) else []
    )
    given = [arg.value for call in (node, *made) for arg in call.args if keyword_of(arg) == "reduction"]
    if facts.script.is_a(node, "distwrap.scale_loss"):
        return False
    return any(constant(each) == "sum" for each in given)


def _is_sum_of(facts: ScriptFacts, node: cst.Call) -> cst.BaseExpression | None:
    """Return what ``x.sum()`` and ``torch.sum(x)`` add up, or None for any other call."""
    if isinstance(node.func, cst.Attribute) and node.func.attr.value == "sum" and not node.args:
        return node.func.value
    if facts.script.is_a(node, "torch.sum") and len(node.args) == 1:
        return node.args[0].value
    return None
