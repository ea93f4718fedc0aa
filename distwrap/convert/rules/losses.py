"""Find losses that are no mean over the samples of a batch, where the ranks divide the batch."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from distwrap.convert.facts import ScriptFacts, TrainingLoop
from distwrap.convert.script import argument, constant, keyword_of, path_of
from distwrap.convert.shares import batch_names

_WEIGHTED = ("cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss")
_SUM = (
    "the loss is a sum over a rank's part of the batch, and gradients are averaged over the ranks, so they are as many "
    "times less as there are ranks"
)
_WEIGHTED_MEAN = (
    "with class weights the mean is over the weights in a rank's part of the batch, and the ranks' parts have other "
    "sums of weights"
)
_WEIGHTS_FIX = 'scale_loss(loss_sum, weights[targets].sum()).backward(), with reduction="sum" for loss_sum'


def wrong_losses(facts: ScriptFacts, training: TrainingLoop) -> Iterator[tuple[cst.Call, str, str]]:
    """Yield the backwards whose loss is no mean over a batch that is divided, each with why and what to write."""
    names = batch_names(facts, training.loop)
    for call, loss in backward_calls(facts, training):
        made = list(facts.values.sources(loss, returned=True))
        if made and all(each is not None and _is_sum(facts, each, names) for each in made):
            yield call, _SUM, f"({facts.script.code(loss)} * world_size()).backward()"
        elif made and all(each is not None and _is_weighted(facts, each) for each in made):
            yield call, _WEIGHTED_MEAN, _WEIGHTS_FIX


def backward_calls(facts: ScriptFacts, training: TrainingLoop) -> Iterator[tuple[cst.Call, cst.BaseExpression]]:
    """Yield the calls that compute gradients in a training loop, each with the loss."""
    for call, attribute in facts.script.method_calls("backward", training.body):
        yield call, attribute.value
    for call in facts.script.calls("distwrap.backward", within=training.body):
        if call.args:
            yield call, call.args[0].value


def _is_sum(facts: ScriptFacts, node: cst.BaseExpression, of_batch: set[str], depth: int = 3) -> bool:
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
        return any(each is not None and _is_sum(facts, each, of_batch, depth - 1) for each in parts)
    if not isinstance(node, cst.Call):
        return False
    summed = _is_sum_of(facts, node)
    if summed is None:
        return _asks_for_sum(facts, node)
    is_joined = any(script.is_a(each, "torch.stack", "torch.cat") for each in script.find(cst.Call, summed))
    return not is_joined and any(each.value in of_batch for each in script.find(cst.Name, summed))


def _is_weighted(facts: ScriptFacts, node: cst.BaseExpression) -> bool:
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
