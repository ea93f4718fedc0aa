"""Sums that a loop over a loader makes: which can be added up over the ranks, and how."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.script import constant, path_of

_QUIET = {"append", "set_postfix", "set_description", "update", "eval", "train", "to", "cuda", "zero_grad", "backward",
          "step", "unscale_", "clip_grad_norm_", "debug", "info", "warning", "add_scalar", "log"}  # fmt: skip
_PRINTS = ("builtins.print", "logging.info", "logging.debug", "logging.warning")


@dataclass
class Reading:
    """Result of reading one loop.

    Attributes:
        loop: that was read.
        is_training: whether it trains.
        sums: names that are added to in the loop and read after it.
        counts: those of them that are added a constant, as a count of batches.
        lists: names of lists of tensors, that are concatenated after it.
        unclear: names that are read after it, and that are neither.
        why: the loop is not clear, in words; empty where it is.
    """

    loop: cst.For
    is_training: bool
    sums: list[str] = field(default_factory=list)
    counts: list[str] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)
    unclear: dict[str, cst.CSTNode] = field(default_factory=dict)
    why: str = ""

    @property
    def is_clear(self) -> bool:
        """Whether all that the loop computes can be added up."""
        return not self.why


def read_loop(conversion: Conversion, loop: cst.For, *, is_training: bool) -> Reading:
    """Return what a loop over a loader leaves for the code after it."""
    script, reading = conversion.script, Reading(loop, is_training)
    for name in _changed_in(conversion, loop):
        reads = _reads_after(conversion, loop, name)
        if not reads:
            continue
        kind = _kind(conversion, loop, name, reads)
        if kind == "sum":
            reading.sums.append(name)
        elif kind == "count":
            reading.counts.append(name)
        elif kind == "list":
            reading.lists.append(name)
        else:
            reading.unclear[name] = reads[0]
    computes = reading.sums or reading.lists or reading.unclear
    ends = (cst.Break, cst.Return, cst.Yield) if computes else (cst.Return, cst.Yield)
    if any(isinstance(each, ends) and _of_this_loop(conversion, each, loop) for each in script.nodes(loop.body)):
        reading.why = "the loop may end before all of the data was seen"
    if reading.unclear and not reading.why:
        reading.why = f"what becomes of {', '.join(reading.unclear)} on several ranks is not clear"
    for call in _acting_calls(conversion, loop):
        name = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
        of = path_of(call.func) or "a call"
        is_meter = name == "update" and not of.lower().startswith(("scaler", "pbar", "bar", "progress", "ema"))
        if (name in _QUIET and not is_meter) or script.is_a(call, *_PRINTS):
            continue
        reading.why = reading.why or f"{of}(...) may keep what each rank alone has seen"
        if is_meter:
            reading.unclear.setdefault(of, call)
    return reading


def _of_this_loop(conversion: Conversion, node: cst.CSTNode, loop: cst.For) -> bool:
    if isinstance(node, cst.Break):
        return (
            next(each for each in conversion.script.ancestors(node) if isinstance(each, (cst.For, cst.While))) is loop
        )
    return conversion.script.function_of(node) is conversion.script.function_of(loop)


def _acting_calls(conversion: Conversion, loop: cst.For) -> Iterator[cst.Call]:
    """Yield the calls of a loop whose result nobody takes, so that they do something."""
    for each in conversion.script.find(cst.Expr, loop.body):
        if isinstance(each.value, cst.Call):
            yield each.value


def _changed_in(conversion: Conversion, loop: cst.For) -> list[str]:
    """Return the names of this function that a loop gives values, or appends to, in the order of the text."""
    script, values = conversion.script, conversion.facts.values
    function = script.function_of(loop)
    found = {
        name
        for (scope, name), bindings in values.bindings.items()
        for binding in bindings
        if scope is function and script.inside(binding.target, loop) and "." not in name
    }
    for call in _acting_calls(conversion, loop):
        if isinstance(call.func, cst.Attribute) and call.func.attr.value in ("append", "extend", "add"):
            found.add(path_of(call.func.value) or "")
    for target in script.find(cst.AssignTarget, loop.body):
        if isinstance(target.target, cst.Subscript):
            found.add(path_of(target.target.value) or "")
    places: dict[str, int] = {}
    for node in script.find(cst.Name, loop):
        places.setdefault(node.value, script.span(node)[0])
    return sorted(found & set(places), key=lambda name: places[name])


def _reads_after(conversion: Conversion, loop: cst.For, name: str) -> list[cst.CSTNode]:
    """Return where a name is read after a loop, before it gets another value in the same block."""
    script, function = conversion.script, conversion.script.function_of(loop)
    end = script.span(loop)[1]
    again = [
        script.span(binding.statement)
        for binding in conversion.facts.values.bindings.get((function, name), [])
        if script.span(binding.target)[0] >= end
        and not isinstance(binding.statement, cst.AugAssign)
        and _is_plain_in(conversion, binding.statement, loop, name)
    ]
    stop = min((place[0] for place in again), default=script.span(function or script.tree)[1])
    return [
        node
        for node in script.find(cst.Name, function or script.tree)
        if node.value == name
        and end <= script.span(node)[0] < stop
        and script.function_of(node) is function
        and not isinstance(script.parent(node), cst.AssignTarget)
        and not _is_label(conversion, node)
    ]


def _is_plain_in(conversion: Conversion, statement: cst.CSTNode, loop: cst.For, name: str) -> bool:
    """Return whether a statement gives a name a value that is not made of its old one, and always runs."""
    script = conversion.script
    if isinstance(statement, cst.For):
        return True
    line = script.parent(statement)
    value = getattr(statement, "value", None)
    reads_itself = value is not None and any(each.value == name for each in script.find(cst.Name, value))
    blocks = [each for each in script.ancestors(loop) if isinstance(each, (cst.IndentedBlock, cst.Module))]
    return not reads_itself and line is not None and script.parent(line) in blocks


def _is_label(conversion: Conversion, node: cst.Name) -> bool:
    """Return whether a name is that of a keyword or attribute, and no variable."""
    above = conversion.script.parent(node)
    return (isinstance(above, cst.Arg) and above.keyword is node) or (
        isinstance(above, cst.Attribute) and above.attr is node
    )


def _kind(conversion: Conversion, loop: cst.For, name: str, reads: list[cst.CSTNode]) -> str:
    script, values = conversion.script, conversion.facts.values
    bindings = values.bindings.get((script.function_of(loop), name), [])
    within = [each for each in bindings if script.inside(each.target, loop)]
    start = _start_value(conversion, loop, name)
    if start is None:
        return ""
    if within:
        added = [each.statement for each in within if isinstance(each.statement, cst.AugAssign)]
        if len(added) < len(within) or not all(isinstance(each.operator, cst.AddAssign) for each in added):
            return ""
        if not _is_zero(conversion, start):
            return ""
        return "count" if all(constant(each.value) is not ... for each in added) else "sum"
    is_empty = isinstance(start, cst.List) and not start.elements
    joined = [each for each in reads if _is_joined(conversion, each)]
    appended = all(
        call.func.attr.value == "append"
        for call in _acting_calls(conversion, loop)
        if isinstance(call.func, cst.Attribute) and path_of(call.func.value) == name
    )
    return "list" if is_empty and appended and len(joined) == len(reads) else ""


def _is_joined(conversion: Conversion, node: cst.CSTNode) -> bool:
    above = conversion.script.parent(node)
    call = conversion.script.parent(above) if isinstance(above, cst.Arg) else None
    if not isinstance(call, cst.Call) or not conversion.script.is_a(call, "torch.cat", "torch.concat"):
        return False
    return len(call.args) == 1 or bool(constant(call.args[1].value) == 0)


def _start_value(conversion: Conversion, loop: cst.For, name: str) -> cst.BaseExpression | None:
    """Return what a name is right before a loop, set in the same block or, around a ``with``, in the one around it."""
    script, values = conversion.script, conversion.facts.values
    blocks = []
    for each in script.ancestors(loop):
        if isinstance(each, (cst.IndentedBlock, cst.Module)):
            blocks.append(each)
        elif not isinstance(each, cst.With):
            break
    before = [
        each
        for each in values.bindings.get((script.function_of(loop), name), [])
        if script.span(each.target)[0] < script.span(loop)[0]
    ]
    if not before:
        return None
    last = max(before, key=lambda each: script.span(each.target))
    line = script.parent(last.statement)
    return last.value if line is not None and script.parent(line) in blocks else None


def _is_zero(conversion: Conversion, node: cst.BaseExpression) -> bool:
    value = constant(node)
    if value is not ...:
        return type(value) in (int, float) and bool(value == 0)
    if conversion.script.is_a(node, "torch.tensor") and isinstance(node, cst.Call) and node.args:
        return bool(constant(node.args[0].value) == 0)
    return conversion.script.is_a(node, "torch.zeros")


def rewrite(conversion: Conversion, reading: Reading, *, all_shared: bool) -> None:
    """Let the code after a loop see what all ranks have added up, or note what it sees instead.

    Args:
        conversion: under way.
        reading: of the loop.
        all_shared: whether each rank goes through its share of whatever the loop is given.
    """
    for name, node in reading.unclear.items():
        conversion.left(
            node, "metric", f"{name} is what rank 0 has seen in its own share of the data",
            f"mean({name}, count), reduce({name}, op=\"sum\") or gather({name}) where a number of all ranks is wanted",
        )  # fmt: skip
    names = [*reading.sums, *(each for each in reading.counts if _is_divisor(conversion, reading, each))]
    if not (reading.sums or reading.lists):
        return
    if not all_shared or (reading.why and not reading.is_training):
        for name in (*reading.sums, *reading.lists):
            where = _reads_after(conversion, reading.loop, name)[0]
            conversion.left(
                where, "metric", f"{name} is what rank 0 has seen; not every loader of this loop is shared",
                f"reduce({name}, op=\"sum\") once all of them are",
            )  # fmt: skip
        return
    if names:
        text = ", ".join(names)
        value = text if len(names) == 1 else f"({text})"
        op = ', op="sum"'
        conversion.edits.line_after(reading.loop, f"{text} = {conversion.call('reduce', value + op)}")
        conversion.done(reading.loop, "metric", f"{text}: added up over the ranks after the loop")
        for node in _lengths(conversion, reading):
            conversion.wrap(node, "reduce", op)
            conversion.done(node, "metric", "each rank has fewer batches; their number is added up too")
    for name in reading.lists:
        for read in _reads_after(conversion, reading.loop, name):
            call = conversion.script.parent(conversion.script.parent(read) or read)
            if call is not None:
                conversion.wrap(call, "gather", ", interleave=True")
                conversion.done(call, "gather", f"{name} of all ranks, in the order of the data")


def _is_divisor(conversion: Conversion, reading: Reading, name: str) -> bool:
    return any(_divides(conversion, each) for each in _reads_after(conversion, reading.loop, name))


def _divides(conversion: Conversion, node: cst.CSTNode) -> bool:
    """Return whether something is divided by a node."""
    above = conversion.script.parent(node)
    if isinstance(above, cst.Arg):  # max(count, 1)
        call = conversion.script.parent(above)
        return call is not None and conversion.script.is_a(call, "builtins.max") and _divides(conversion, call)
    if isinstance(above, cst.BinaryOperation):
        return isinstance(above.operator, cst.Divide) and above.right is node
    return isinstance(above, cst.AugAssign) and isinstance(above.operator, cst.DivideAssign) and above.value is node


def _lengths(conversion: Conversion, reading: Reading) -> Iterator[cst.CSTNode]:
    """Yield the numbers of batches by which sums of a loop are divided after it."""
    script, values = conversion.script, conversion.facts.values
    iterated = path_of(conversion.facts.iterated(reading.loop))
    reads = {each for name in reading.sums for each in _reads_after(conversion, reading.loop, name)}
    targets = {script.small_statement_of(read) for read in reads} | {script.statement_of(read) for read in reads}
    for statement in targets:
        if isinstance(statement, (cst.SimpleStatementLine, cst.If, cst.For, cst.While, cst.With, cst.Try)):
            continue
        for node in script.expressions(statement):
            if script.span(node)[0] < script.span(reading.loop)[1] or not _divides(conversion, node):
                continue
            if _is_length(conversion, node, iterated):
                yield node
            elif isinstance(node, cst.Name):
                given = values.bound(node)
                if len(given) == 1 and given[0].value is not None and _is_length(conversion, given[0].value, iterated):
                    yield node


def _is_length(conversion: Conversion, node: cst.CSTNode, of: str | None) -> bool:
    return (
        isinstance(node, cst.Call)
        and conversion.script.is_a(node, "builtins.len")
        and len(node.args) == 1
        and path_of(node.args[0].value) == of is not None
    )
