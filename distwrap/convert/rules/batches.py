"""Divide among the ranks the batches that a loop slices from a tensor."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.facts import TrainingLoop
from distwrap.convert.rules.metrics import read_loop
from distwrap.convert.script import path_of


def share_own_batches(conversion: Conversion) -> None:
    """Give each rank its part of a training loop's slices, or its own columns of a text in columns."""
    for each in conversion.facts.training_loops:
        if not isinstance(each.loop, cst.For) or not conversion.may_change(each.loop):
            continue
        ranges = conversion.facts.iterated(each.loop)
        if not isinstance(ranges, cst.Call) or not conversion.script.is_a(ranges, "builtins.range"):
            continue
        if _split_slices(conversion, each, ranges):
            conversion.split_batches.add(each.loop)
            conversion.own_batches.add(each.loop)
        elif _take_columns(conversion, ranges):
            conversion.own_batches.add(each.loop)


def _split_slices(conversion: Conversion, training: TrainingLoop, ranges: cst.Call) -> bool:
    """Split each ``x[i : i + n]`` of a loop over ``range(0, len(x), n)``."""
    script, loop = conversion.script, training.loop
    assert isinstance(loop, cst.For)
    target: cst.BaseExpression = loop.target
    if isinstance(target, cst.Tuple) and len(target.elements) == 2:  # enumerate(range(...))
        target = target.elements[1].value
    if len(ranges.args) != 3 or not isinstance(target, cst.Name):
        return False
    index, step = target.value, script.code(ranges.args[2].value)
    found: dict[cst.Subscript, None] = {}
    for name in script.find(cst.Name, loop.body):
        if name.value == index:
            cut = next((each for each in script.ancestors(name) if isinstance(each, cst.Subscript)), None)
            if cut is None or not script.inside(cut, loop):
                continue  # as in a condition or a print
            if not _is_slice(conversion, cut, index, step) or not conversion.may_change(cut):
                return False
            found[cut] = None
    for cut in found:
        conversion.wrap(cut, "split")
        conversion.done(
            cut, "split", "each rank takes its part of this batch, whose size is that of all ranks together; where a "
            "last batch may have fewer samples than there are ranks, leave it out",
        )  # fmt: skip
    if found:
        for total in read_loop(conversion, loop, is_training=True).sums:
            conversion.left(
                loop, "metric", f"{total} is what rank 0 has seen, of its parts of the batches",
                f"mean({total}, count), or reduce({total}, op=\"sum\"), where a number of all ranks is wanted",
            )  # fmt: skip
    return bool(found)


def _is_slice(conversion: Conversion, cut: cst.Subscript, index: str, step: str) -> bool:
    match cut.slice:
        case [
            cst.SubscriptElement(
                slice=cst.Slice(
                    lower=lower, upper=cst.BinaryOperation(left=start, operator=cst.Add(), right=size), step=None
                )
            )
        ]:
            return path_of(lower) == path_of(start) == index and conversion.script.code(size) == step
    return False


def _take_columns(conversion: Conversion, ranges: cst.Call) -> bool:
    """Give each rank its own columns of a text that is laid out in columns and read along all of them."""
    script, values = conversion.script, conversion.facts.values
    lengths = [path_of(each) for arg in ranges.args for each in _measured(conversion, arg.value)]
    for path in lengths:
        for binding in [each for found in values.bindings.values() for each in found]:
            if path is None or path_of(binding.target) != path or not isinstance(binding.value, cst.Call):
                continue
            function = values.functions.get(path_of(binding.value.func) or "")
            position = None if function is None else _columns_parameter(conversion, function)
            if position is None or position >= len(binding.value.args) or not conversion.may_change(binding.value):
                continue
            count = binding.value.args[position].value
            text = script.code(count) if path_of(count) or isinstance(count, cst.Integer) else f"({script.code(count)})"
            conversion.edits.replace(count, f"{text} * {conversion.call('world_size')}")
            own = f"[:, {conversion.call('rank')}::{conversion.call('world_size')}]"
            conversion.edits.insert(script.span(binding.value)[1], own)
            conversion.done(
                binding.statement, "columns", "each rank has as many columns of its own, and reads them in the order "
                "of the text; a step sees those of all ranks",
            )  # fmt: skip
            return True
    return False


def _measured(conversion: Conversion, node: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """Yield the tensor in ``len(x)``, ``x.size(0)`` and ``x.shape[0]``."""
    script = conversion.script
    for call in script.find(cst.Call, node):
        if script.is_a(call, "builtins.len") and call.args:
            yield call.args[0].value
        elif isinstance(call.func, cst.Attribute) and call.func.attr.value == "size":
            yield call.func.value
    for attribute in script.find(cst.Attribute, node):
        if attribute.attr.value == "shape":
            yield attribute.value


def _columns_parameter(conversion: Conversion, function: cst.FunctionDef) -> int | None:
    """Return the position of the parameter ``columns`` in ``data.view(columns, -1).t()``, or None."""
    for node in conversion.script.expressions(function.body):
        match _transposed(node):
            case cst.Call(func=cst.Attribute(attr=cst.Name(value="view" | "reshape")), args=[columns, rest]) if (
                conversion.script.code(rest.value) == "-1"
            ):
                name = path_of(columns.value)
                return None if name is None else conversion.facts.values.parameter(function, name)
    return None


def _transposed(node: cst.BaseExpression) -> cst.BaseExpression | None:
    """Return the tensor in ``x.t()``, ``x.T`` or ``x.transpose(0, 1)``, or None."""
    match node:
        case cst.Attribute(value=value, attr=cst.Name(value="T")):
            return value
        case cst.Call(func=cst.Attribute(value=value, attr=cst.Name(value="t")), args=[]):
            return value
        case cst.Call(func=cst.Attribute(value=value, attr=cst.Name(value="transpose")), args=[_, _]):
            return value
    return None
