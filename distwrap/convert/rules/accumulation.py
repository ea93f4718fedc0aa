"""Gradient accumulation: group micro-batches into windows, with one exchange of gradients for each."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.facts import TrainingLoop
from distwrap.convert.script import constant, path_of


def accumulate_in_windows(conversion: Conversion) -> None:
    """Make loops that step every few batches exchange gradients only at these steps."""
    for each in conversion.facts.training_loops:
        every = _every(conversion, each)
        if every is None or not isinstance(each.loop, cst.For) or not conversion.may_change(each.loop):
            continue
        model = _model_called(conversion, each)
        if model is None or not _take_windows(conversion, each.loop, every, model):
            conversion.left(
                each.loop, "accumulate", f"it steps every {every} batches, and exchanges gradients in each, which "
                f"is right but slower", f"for batch, window in accumulate(loader, {every}, model)",
            )  # fmt: skip


def _every(conversion: Conversion, loop: TrainingLoop) -> str | None:
    """Return the number of batches between steps, as text, for a loop that steps ``if (i + 1) % n == 0``, or None."""
    script = conversion.script
    match loop.loop:
        case cst.For(target=cst.Tuple(elements=[index, *_]), iter=cst.Call(args=given) as call) if script.is_a(
            call, "builtins.enumerate"
        ):
            from_one = len(given) == 2 and constant(given[1].value) == 1
            turn = path_of(index.value) if from_one else f"{path_of(index.value)}+1"
        case _:
            return None
    for branch in script.ancestors(loop.step):
        if branch is loop.loop:
            break
        if not isinstance(branch, cst.If):
            continue
        for node in script.find(cst.Comparison, branch.test):
            match node:
                case cst.Comparison(
                    left=cst.BinaryOperation(left=counted, operator=cst.Modulo(), right=every),
                    comparisons=[cst.ComparisonTarget(operator=cst.Equal(), comparator=rest)],
                ) if constant(rest) == 0 and script.code(counted).replace(" ", "") == turn:
                    if isinstance(every, cst.Integer) or path_of(every) is not None:
                        return script.code(every)
    return None


def _model_called(conversion: Conversion, loop: TrainingLoop) -> str | None:
    """Return the name of the only wrapped model that a loop calls, or None."""
    found = {
        path
        for call in conversion.script.find(cst.Call, loop.loop.body)
        if (path := path_of(call.func)) is not None
        and (
            path in conversion.wrapped
            or any(each in conversion.wrapped_expressions for each in conversion.facts.values.sources(call.func))
        )
    }
    return found.pop() if len(found) == 1 else None


def _take_windows(conversion: Conversion, loop: cst.For, every: str, model: str) -> bool:
    """Make a loop over ``enumerate(loader)`` go through windows; return whether it is plain enough for that."""
    script = conversion.script
    iterated = conversion.facts.iterated(loop)
    match loop:
        case cst.For(target=cst.Tuple(elements=[_, element]), iter=cst.Call(args=[first, *_])) if (
            first.value is iterated
        ):
            batch = element.value
        case _:
            return False
    window = "window" if "window" not in script.bound_names else "distwrap_window"
    start, end = script.span(batch)
    text = script.data[start:end].decode()
    is_bare = isinstance(batch, cst.Tuple) and not batch.lpar
    if isinstance(batch, cst.Tuple) and batch.lpar:
        start, end = script.data.rfind(b"(", 0, start), script.data.find(b")", end) + 1
        text = script.data[start:end].decode()
    text = f"({text})" if is_bare else text
    conversion.edits.replace_span(start, end, f"({text}, {window})")
    conversion.edits.wrap(iterated, f"{conversion.helpers.name('accumulate')}(", f", {every}, {model})")
    conversion.done(loop, "accumulate", "gradients are exchanged once a window, at the step")
    return True
