"""Sums that a loop over a loader makes: which can be added up over the ranks, and how."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    """Result of reading one loop.

    Attributes:
        loop: that was read.
        is_training: whether it trains.
        sums: names that are added to in the loop and read after it.
        counts: those of them that are added a constant, as a count of batches.
        lists: names of lists of tensors, that are concatenated after it.
        unclear: names that are read after it, and that are neither.
        why: the loop is not clear, in words; empty where it is.
        is_added: whether its sums have been added up over the ranks.
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
        """Whether all that the loop computes can be added up."""
        return not self.why


def read_loop(conversion: Conversion, loop: cst.For, *, is_training: bool) -> Reading:
    """Return what a loop over a loader leaves for the code after it."""
    script, reading = conversion.script, Reading(loop, is_training)
    for name in _changed_in(conversion, loop):
        reads = _reads_after(conversion, loop, name)
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
    """Yield the attributes, as ``self.total``, to which a loop adds what it computes, with the place."""
    for added in conversion.script.find(cst.AugAssign, loop.body):
        node: cst.BaseExpression = added.target
        while isinstance(node, cst.Subscript):
            node = node.value
        path = path_of(node)
        if path is not None and "." in path and constant(added.value) is ...:
            yield path, added


def _reads_after(conversion: Conversion, loop: cst.For, name: str) -> list[cst.CSTNode]:
    """Return where a name is read after a loop, before it gets another value in the same block."""
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
    """Return whether a name gets another value between the end of a loop and a read, wherever the read is reached."""
    script, statement = conversion.script, binding.statement
    if not end <= script.span(binding.target)[0] < script.span(read)[0] or isinstance(statement, cst.AugAssign):
        return False
    if isinstance(statement, cst.For):
        return script.inside(read, statement.body)
    block = script.parent(script.statement_of(statement))
    while isinstance(outer := None if block is None else script.parent(block), cst.With):  # which always runs
        block = script.parent(outer)
    return not script.inside(read, statement) and any(each is block for each in script.ancestors(read))


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
    """Return whether a loop only adds a number that is written to a name, as to its steps, alike on all ranks."""
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


def add_up_sums(conversion: Conversion, reading: Reading, *, all_shared: bool) -> None:
    """Let the code after a loop see what all ranks have added up, or note what it sees instead.

    Args:
        conversion: under way.
        reading: of the loop.
        all_shared: whether each rank goes through its share of whatever the loop is given.
    """
    for name, node in reading.unclear.items():
        conversion.own_reads |= set(_reads_after(conversion, reading.loop, name))
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
        reading.is_added = True
        value = text if len(names) == 1 else f"({text})"
        op = ', op="sum"'
        conversion.edits.line_after(reading.loop, f"{text} = {conversion.call('reduce', value + op)}")
        conversion.done(reading.loop, "metric", f"{text}: added up over the ranks after the loop")
        for node in dict.fromkeys(_lengths(conversion, reading)):
            if node in conversion.averaged:
                continue
            conversion.averaged.add(node)
            conversion.wrap(node, "reduce", op)
            conversion.done(node, "metric", "each rank has fewer batches; their number is added up too")
    for name in reading.lists:
        for read in _reads_after(conversion, reading.loop, name):
            call = conversion.script.parent(conversion.script.parent(read) or read)
            if call is not None:
                conversion.wrap(call, "gather", ", interleave=True")
                conversion.done(call, "gather", f"{name} of all ranks, in the order of the data")


def _is_divisor(conversion: Conversion, reading: Reading, name: str) -> bool:
    """Return whether something is divided by a count after a loop, or may be by whom the loop's sums are handed to."""
    return any(
        _divides(conversion, each) or isinstance(conversion.script.small_statement_of(each), cst.Return)
        for each in _reads_after(conversion, reading.loop, name)
    )


def _divides(conversion: Conversion, node: cst.CSTNode) -> bool:
    """Return whether something is divided by a node."""
    above = conversion.script.parent(node)
    match above:
        case cst.Arg():  # max(count, 1)
            call = conversion.script.parent(above)
            return call is not None and conversion.script.is_a(call, "builtins.max") and _divides(conversion, call)
        case cst.BinaryOperation(operator=cst.Multiply()):  # len(loader) * batch_size
            return _divides(conversion, above)
        case cst.BinaryOperation(operator=cst.Divide() | cst.FloorDivide(), right=divisor):
            return divisor is node
        case cst.AugAssign(operator=cst.DivideAssign(), value=divisor):
            return divisor is node
    return False


def _lengths(conversion: Conversion, reading: Reading) -> Iterator[cst.CSTNode]:
    """Yield the numbers of batches by which sums of a loop are divided after it, by callers of its function too."""
    script, values = conversion.script, conversion.facts.values
    iterated = conversion.facts.iterated(reading.loop)
    reads = {each for name in reading.sums for each in _reads_after(conversion, reading.loop, name)}
    targets = {script.small_statement_of(read) for read in reads} | {script.statement_of(read) for read in reads}
    targets |= {script.small_statement_of(each) for each in _handed_back(conversion, reading, reads)}
    for statement in targets:
        if isinstance(statement, (cst.SimpleStatementLine, cst.If, cst.For, cst.While, cst.With, cst.Try)):
            continue
        for node in script.expressions(statement):
            if script.inside(node, reading.loop) or not _divides(conversion, node):
                continue
            if _is_length(conversion, node, iterated):
                yield node
            elif isinstance(node, cst.Name):
                made = given[0].value if len(given := values.bound(node)) == 1 else None
                if made and any(_is_length(conversion, each, iterated) for each in script.expressions(made)):
                    yield node


def note_lengths(conversion: Conversion, readings: Iterable[Reading]) -> None:
    """Note divisors that are numbers of batches, of loops whose sums are added up, and that are not."""
    for node in dict.fromkeys(each for one in readings if one.is_added for each in _other_lengths(conversion, one)):
        text = conversion.script.code(node)
        conversion.left(
            node, "metric", f"{text} counts this rank's batches alone, and a sum of all ranks may be divided by it",
            f"reduce({text}, op=\"sum\"), outside of the loop",
        )  # fmt: skip


def _other_lengths(conversion: Conversion, reading: Reading) -> Iterator[cst.CSTNode]:
    """Yield other divisors that are the number of batches, but for those of progress within the loop."""
    script, iterated = conversion.script, conversion.facts.iterated(reading.loop)
    for node in script.expressions():
        made = node
        if isinstance(node, cst.Name) and len(given := conversion.facts.values.bound(node)) == 1:
            made = given[0].value or node
        if node in conversion.averaged or not _is_length(conversion, made, iterated) or not _divides(conversion, node):
            continue
        statement = script.small_statement_of(node)
        is_added = isinstance(statement, cst.AugAssign) and path_of(statement.target) in reading.sums
        if is_added or not script.inside(node, reading.loop):
            yield node


def _handed_back(conversion: Conversion, reading: Reading, reads: set[cst.CSTNode]) -> Iterator[cst.CSTNode]:
    """Yield the calls of a loop's function that return its sums, and the reads of what is set to them."""
    script, values = conversion.script, conversion.facts.values
    function = script.function_of(reading.loop)
    holders = {script.parent(script.parent(each) or each) for each in reads} | {script.parent(each) for each in reads}
    if function is None or not any(isinstance(each, (cst.Return, cst.Tuple)) for each in holders):
        return
    for call in values.callers(function):
        yield call
        for (scope, name), bindings in values.bindings.items():
            if any(call in (each.value, each.unpacked) for each in bindings):
                for node in script.find(cst.Name, scope if isinstance(scope, cst.FunctionDef) else script.tree):
                    if node.value == name and script.function_of(node) is scope:
                        yield node


def _is_length(conversion: Conversion, node: cst.CSTNode, of: cst.BaseExpression) -> bool:
    """Return whether an expression is the number of batches of a loader, under its name in any function."""
    if not isinstance(node, cst.Call) or not conversion.script.is_a(node, "builtins.len") or len(node.args) != 1:
        return False
    given, facts = node.args[0].value, conversion.facts
    loaders = {each for each in facts.loader_of(of) if each is not None}
    is_named = conversion.script.function_of(node) is conversion.script.function_of(of) and path_of(of) is not None
    return (is_named and path_of(given) == path_of(of)) or bool(loaders & set(facts.loader_of(given)))
