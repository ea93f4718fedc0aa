"""Convert Accelerate's accumulation: write out that optimizer and scheduler act only when gradients are complete.

Source: https://huggingface.co/docs/accelerate/concept_guides/gradient_synchronization
"""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from distwrap.convert.conversion import Conversion, Kind
from distwrap.convert.edits import INDENT, LINE
from distwrap.convert.rules.accumulation import take_windows
from distwrap.convert.script import Function, constant, path_of

SYNC = "sync_gradients"


@dataclass
class AccumulationPlan:
    """Plan to convert a script's gradient accumulation with Accelerate.

    Attributes:
        every: the number of batches between steps, as text; empty for one.
        function: the function in which this text is valid, or None for the module level.
        may_scale: whether the precision may be fp16, whose gradients are scaled.
        windows: each loop with the name of its window.
        blocks: the ``with accelerator.accumulate(model)`` statements.
        kept_indent: starts of lines that keep their indentation when the block around them is removed.
    """

    every: str
    function: Function | None
    may_scale: bool
    windows: dict[cst.For, str] = field(default_factory=dict)
    blocks: list[cst.With] = field(default_factory=list)
    kept_indent: set[int] = field(default_factory=set)


def write_out(conversion: Conversion, accumulation: AccumulationPlan, names: set[str]) -> bool:
    """Convert windows and steps, before other uses of the object; return whether all of it was clear."""
    script = conversion.script
    found = [call for call, attribute in script.method_calls("accumulate") if path_of(attribute.value) in names]
    if not all(_window(conversion, accumulation, call) for call in found):
        return False
    if accumulation.every and not found:
        conversion.unsure(
            script.tree, "accumulate", "gradients accumulate, but no accelerator.accumulate(model) says where",
            "for batch, window in accumulate(loader, steps, model)",
        )  # fmt: skip
        return False
    for node in list(script.find(cst.Attribute)):
        if node.attr.value == SYNC and path_of(node.value) in names and not _answer(conversion, accumulation, node):
            return False
    if not _steps(conversion, accumulation):
        return False
    for block in accumulation.blocks:
        _dedent(conversion, accumulation, block)
    return True


def _answer(conversion: Conversion, accumulation: AccumulationPlan, node: cst.Attribute) -> bool:
    window = _window_of(conversion, accumulation, node)
    if window is None and accumulation.windows:
        conversion.unsure(node, "accumulate", "it is asked outside of the loop that accumulates", "window.last")
        return False
    conversion.edits.replace(node, f"{window}.last" if window is not None else "True")
    conversion.done(node, "accumulate", "whether this batch is the last one before a step")
    return True


def _window_of(conversion: Conversion, accumulation: AccumulationPlan, node: cst.CSTNode) -> str | None:
    loops = (each for each in conversion.script.ancestors(node) if isinstance(each, cst.For))
    return next((accumulation.windows[each] for each in loops if each in accumulation.windows), None)


def _window(conversion: Conversion, accumulation: AccumulationPlan, call: cst.Call) -> bool:
    """Make the loop around a ``with accelerator.accumulate(model)`` iterate over windows."""
    script = conversion.script
    block = script.small_statement_of(call)
    loop = next(
        (each for each in script.ancestors(call) if isinstance(each, (cst.For, cst.While, cst.FunctionDef))), None
    )
    models = [path_of(arg.value) for arg in call.args]
    is_plain = (
        isinstance(block, cst.With)
        and isinstance(block.body, cst.IndentedBlock)
        and len(block.items) == 1
        and block.items[0].item is call
        and block.items[0].asname is None
        and isinstance(loop, cst.For)
    )
    if (
        not is_plain
        or not models
        or None in models
        or not accumulation.every
        or not _is_seen(conversion, accumulation, call)
    ):
        conversion.unsure(
            call, "accumulate", "accumulate used in this way has no equal in the table",
            "for batch, window in accumulate(loader, steps, model)",
        )  # fmt: skip
        return False
    assert isinstance(loop, cst.For)
    assert isinstance(block, cst.With)
    model = models[0] if len(models) == 1 else f"[{', '.join(each or '' for each in models)}]"
    window = take_windows(conversion, loop, accumulation.every, model or "")
    if window is None:
        conversion.unsure(loop, "accumulate", "its loop is not plain", "for batch, window in accumulate(loader, ...)")
        return False
    accumulation.windows[loop] = window
    accumulation.blocks.append(block)
    return True


def _is_seen(conversion: Conversion, accumulation: AccumulationPlan, node: cst.CSTNode) -> bool:
    """Return whether the number of batches is also valid at a node."""
    function = accumulation.function
    if accumulation.every.isdigit() or function is None or conversion.script.function_of(node) is function:
        return True
    conversion.unsure(node, "accumulate", f"{accumulation.every} belongs to another function", "pass it as an argument")
    return False


def backward(conversion: Conversion, accumulation: AccumulationPlan, call: cst.Call) -> bool:
    """Convert ``accelerator.backward(loss)``, which divides the loss by the number of batches."""
    if len(call.args) != 1 or call.args[0].keyword is not None or call.args[0].star:
        return False
    if accumulation.every and not _is_seen(conversion, accumulation, call):
        return False
    value = conversion.script.code(call.args[0].value)
    if accumulation.every:
        value = value if path_of(call.args[0].value) is not None else f"({value})"
        value = f"{value} / {accumulation.every}"
    conversion.edits.replace(call, conversion.call("backward", value))
    return True


def _steps(conversion: Conversion, accumulation: AccumulationPlan) -> bool:
    """Make steps act only at a window's end, repeat scheduler steps as Accelerate does, and unscale if needed.

    Return whether no other statement shares a line with such a step.
    """
    script = conversion.script
    groups: dict[cst.CSTNode, list[cst.CSTNode]] = {}
    stepped: list[cst.CSTNode] = []
    for name in ("step", "zero_grad"):
        for call, attribute in list(script.method_calls(name)):
            kind = _kind_of_stepped(conversion, call, attribute)
            statement = script.small_statement_of(call)
            if kind is None or not isinstance(statement, cst.Expr) or statement.value is not call:
                continue
            stepped.append(statement)
            window = _window_of(conversion, accumulation, call)
            if window is not None and not is_asked(conversion, call):
                line = script.statement_of(call)
                groups.setdefault(script.parent(line) or line, []).append(line)
            if kind == "scheduler":
                often = f"for _ in range({conversion.call('world_size')})"
                if conversion.edits.has_line_of_its_own(statement):
                    conversion.edits.insert(script.span(statement)[0], f"{often}: ")
                else:  # a ``for`` statement cannot share its line
                    conversion.edits.wrap(call, "[", f" {often}]")
                conversion.done(
                    call, "scheduler", "Accelerate steps a prepared schedule once for each rank; so does this line. "
                    "A schedule over the steps of one rank needs one call alone"
                )  # fmt: skip
            elif name == "step" and accumulation.may_scale:
                conversion.edits.replace(call, conversion.call("optimizer_step", script.code(attribute.value)))
                conversion.done(call, "precision", "unscales, steps or skips, where the precision is fp16")
    for each in (line for lines in groups.values() for line in lines):
        for other in each.body if isinstance(each, cst.SimpleStatementLine) else ():
            if not any(other is one for one in stepped):
                conversion.unsure(
                    other, "accumulate", "its line has a step that acts at the end of a window alone",
                    "it on a line of its own",
                )  # fmt: skip
                return False
    for lines in groups.values():
        for run in _runs(conversion, lines):
            _under_window(conversion, accumulation, run)
    return True


def _kind_of_stepped(conversion: Conversion, call: cst.Call, attribute: cst.Attribute) -> Kind | None:
    """Return whether a prepared optimizer or scheduler steps, under any of its names, or None."""
    path, scope = path_of(attribute.value) or "", conversion.facts.values.scope
    function = conversion.script.function_of(call)
    for one in conversion.prepared:
        if one.kind in ("optimizer", "scheduler") and one.path == path:
            is_of_self = path.startswith("self.") and one.function is not None
            if one.function is function or (is_of_self and scope(call, path) is scope(one.function or call, path)):
                return one.kind
    if conversion.facts.values.parameter(function, path) is None:
        return None
    given = {
        one.kind
        for each in conversion.facts.values.callers(function)  # type: ignore[arg-type]
        for arg in each.args
        for one in conversion.prepared
        if one.path == path_of(arg.value) and one.function is conversion.script.function_of(each)
    }
    kind: Kind = "scheduler" if conversion.facts.is_scheduler(attribute.value) else "optimizer"
    return kind if kind in given else None


def is_asked(conversion: Conversion, call: cst.Call) -> bool:
    """Return whether a step is already under ``if accelerator.sync_gradients``."""
    return any(
        isinstance(each, cst.If) and SYNC in conversion.script.code(each.test)
        for each in conversion.script.ancestors(call)
    )


def _runs(conversion: Conversion, lines: list[cst.CSTNode]) -> list[list[cst.CSTNode]]:
    """Return consecutive statements of one block as groups."""
    siblings = list(conversion.script.siblings(lines[0]))
    runs: list[list[cst.CSTNode]] = []
    last = -2
    for number, each in enumerate(siblings):
        if any(each is line for line in lines):
            if number != last + 1:
                runs.append([])
            runs[-1].append(each)
            last = number
    return runs


def _under_window(conversion: Conversion, accumulation: AccumulationPlan, run: list[cst.CSTNode]) -> None:
    """Put statements under ``if window.last:``; inside a removed block they keep their indentation."""
    script, edits = conversion.script, conversion.edits
    inside = any(each in accumulation.blocks for each in script.ancestors(run[0]))
    indent, window = edits.indent_of(run[0]), _window_of(conversion, accumulation, run[0])
    start = edits.line_start(script.span(run[0])[0])
    head = indent.removesuffix(script.indent) if inside else indent
    edits.insert(start, f"{head}if {window}.last:{script.newline}", LINE)
    conversion.done(run[0], "accumulate", "it acts at the end of a window alone, as Accelerate's does by itself")
    place, end = start, script.span(run[-1])[1]
    while place < end:
        if not inside:
            edits.insert(place, script.indent, INDENT)
        accumulation.kept_indent.add(place)
        place = edits.line_end(place)


def _dedent(conversion: Conversion, accumulation: AccumulationPlan, block: cst.With) -> None:
    """Remove a block's header and indentation."""
    script, edits = conversion.script, conversion.edits
    start, end = script.span(block)
    place = edits.line_end(script.span(block.items[-1])[1])
    edits.replace_span(edits.line_start(start), place, "", LINE)
    texts = script.long_texts(block)
    while place < end:
        line = script.data[place : edits.line_end(place)]
        is_text = any(low < place < high for low, high in texts)
        stays = is_text or place in accumulation.kept_indent
        if line.startswith(script.indent.encode()) and line.strip() and not stays:
            edits.replace_span(place, place + len(script.indent), "")
        place = edits.line_end(place)
    conversion.done(block, "accumulate", "the loop goes through windows; gradients are exchanged once in each")


def steps_of(conversion: Conversion, node: cst.BaseExpression | None) -> str | None:
    """Return the number of batches between steps, as text, empty for one; None if it is not clear."""
    if node is None or constant(node) == 1:
        return ""
    if type(constant(node)) is int or path_of(node) is not None:
        return conversion.script.code(node)
    return None
