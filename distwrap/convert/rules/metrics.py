"""Find what a loop over a loader computes and later code reads: sums, counts and lists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.script import constant, path_of
from distwrap.convert.values import Binding

_QUIET = {"append", "set_postfix", "set_description", "update", "eval", "train", "to", "cuda", "zero_grad", "backward",
          "step", "unscale_", "clip_grad_norm_", "debug", "info", "warning", "add_scalar", "log"}  # fmt: skip
_PRINTS = ("builtins.print", "logging.info", "logging.debug", "logging.warning")


@dataclass
class Reading:
    """Results of a loop that later code reads.

    Attributes:
        loop: the loop.
        is_training: whether the loop trains.
        sums: names that the loop adds to and later code reads.
        counts: names to which the loop adds only constants, such as a count of batches.
        lists: names of lists of tensors that are concatenated after the loop.
        unclear: names that later code reads and that are none of these.
        why: the reason why the loop is not clear; empty if it is clear.
        is_added: whether its sums are already added up over the ranks.
    """

    loop: cst.For
    is_training: bool
    sums: list[str] = field(default_factory=list)
    counts: list[str] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)
    unclear: dict[str, cst.CSTNode] = field(default_factory=dict)
    why: str = ""
    is_added: bool = False

    @property
    def is_clear(self) -> bool:
        """Whether everything that the loop computes can be added up."""
        return not self.why


def read_loop(conversion: Conversion, loop: cst.For, *, is_training: bool) -> Reading:
    """Return the results of a loop over a loader that later code reads."""
    script, reading = conversion.script, Reading(loop, is_training)
    for name in _changed_in(conversion, loop):
        reads = reads_after(conversion, loop, name)
        if not reads:
            continue
        kind = _role_of(conversion, loop, name, reads)
        if kind == "sum":
            reading.sums.append(name)
        elif kind == "count":
            reading.counts.append(name)
        elif kind == "list":
            reading.lists.append(name)
        elif not (is_training and _counts_turns(conversion, loop, name)):
            reading.unclear[name] = reads[0]
    for name, node in _attributes_added(conversion, loop):
        reading.unclear.setdefault(name, node)
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
    """Yield the calls in a loop whose result is not used, so they have a side effect."""
    for each in conversion.script.find(cst.Expr, loop.body):
        if isinstance(each.value, cst.Call):
            yield each.value


def _changed_in(conversion: Conversion, loop: cst.For) -> list[str]:
    """Return the local names that a loop assigns or appends to, in the order of the text."""
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
    changed: list[cst.BaseExpression] = [each.target for each in script.find(cst.AssignTarget, loop.body)]
    changed += [each.target for each in script.find(cst.AugAssign, loop.body)]
    for node in changed:
        while isinstance(node, cst.Subscript):
            node = node.value
            found.add(path_of(node) or "")
    places: dict[str, int] = {}
    for node in script.find(cst.Name, loop):
        places.setdefault(node.value, script.span(node)[0])
    return sorted(found & set(places), key=lambda name: places[name])


def _attributes_added(conversion: Conversion, loop: cst.For) -> Iterator[tuple[str, cst.CSTNode]]:
    """Yield the attributes, such as ``self.total``, that a loop adds to, with the statement."""
    for added in conversion.script.find(cst.AugAssign, loop.body):
        node: cst.BaseExpression = added.target
        while isinstance(node, cst.Subscript):
            node = node.value
        path = path_of(node)
        if path is not None and "." in path and constant(added.value) is ...:
            yield path, added


def reads_after(conversion: Conversion, loop: cst.For, name: str) -> list[cst.CSTNode]:
    """Return the reads of a name after a loop, until it is assigned again in the same block."""
    script, function = conversion.script, conversion.script.function_of(loop)
    end = script.span(loop)[1]
    given = conversion.facts.values.bindings.get((function, name), [])
    again = [
        script.span(binding.statement)
        for binding in given
        if script.span(binding.target)[0] >= end
        and not isinstance(binding.statement, cst.AugAssign)
        and _is_plain_in(conversion, binding.statement, loop, name)
    ]
    stop = min((place[0] for place in again), default=script.span(function or script.tree)[1])
    return [
        node
        for node in script.reads(name, function)
        if end <= script.span(node)[0] < stop
        and script.function_of(node) is function
        and not any(node is each.target and not isinstance(each.statement, cst.AugAssign) for each in given)
        and not any(_gives_before(conversion, each, node, end) for each in given)
    ]


def _gives_before(conversion: Conversion, binding: Binding, read: cst.CSTNode, end: int) -> bool:
    """Return whether an assignment between a loop's end and a read always runs before the read."""
    script, statement = conversion.script, binding.statement
    if not end <= script.span(binding.target)[0] < script.span(read)[0] or isinstance(statement, cst.AugAssign):
        return False
    if isinstance(statement, cst.For):
        return script.inside(read, statement.body)
    block = script.parent(script.statement_of(statement))
    while isinstance(outer := None if block is None else script.parent(block), cst.With):  # always runs
        block = script.parent(outer)
    return not script.inside(read, statement) and any(each is block for each in script.ancestors(read))


def _is_plain_in(conversion: Conversion, statement: cst.CSTNode, loop: cst.For, name: str) -> bool:
    """Return whether a statement always runs and assigns a value that does not use the old one."""
    script = conversion.script
    if isinstance(statement, cst.For):
        return True
    line = script.parent(statement)
    value = getattr(statement, "value", None)
    reads_itself = value is not None and any(each.value == name for each in script.find(cst.Name, value))
    blocks = [each for each in script.ancestors(loop) if isinstance(each, (cst.IndentedBlock, cst.Module))]
    return not reads_itself and line is not None and script.parent(line) in blocks


def _role_of(conversion: Conversion, loop: cst.For, name: str, reads: list[cst.CSTNode]) -> str:
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


def _counts_turns(conversion: Conversion, loop: cst.For, name: str) -> bool:
    """Return whether a loop only adds constants to a name, such as a step count, alike on all ranks."""
    script, bindings = conversion.script, conversion.facts.values.bindings.get
    within = [each for each in bindings((script.function_of(loop), name), []) if script.inside(each.target, loop)]
    added = [each.statement for each in within if isinstance(each.statement, cst.AugAssign)]
    return bool(added) and len(added) == len(within) and all(constant(each.value) is not ... for each in added)


def _is_joined(conversion: Conversion, node: cst.CSTNode) -> bool:
    above = conversion.script.parent(node)
    call = conversion.script.parent(above) if isinstance(above, cst.Arg) else None
    if not isinstance(call, cst.Call) or not conversion.script.is_a(call, "torch.cat", "torch.concat"):
        return False
    return len(call.args) == 1 or bool(constant(call.args[1].value) == 0)


def _start_value(conversion: Conversion, loop: cst.For, name: str) -> cst.BaseExpression | None:
    """Return a name's value right before a loop, if assigned in its block or around its ``with``, or None."""
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
