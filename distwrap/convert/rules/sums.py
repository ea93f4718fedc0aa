"""Add up over the ranks what a loop computes, and find the lengths by which later code divides it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.facts import ScriptFacts
from distwrap.convert.rules.metrics import Reading, reads_after
from distwrap.convert.script import argument, path_of


def add_up_sums(conversion: Conversion, reading: Reading, *, all_shared: bool) -> None:
    """Add up a loop's results over the ranks, or note what the code after it sees instead.

    Args:
        conversion: the current conversion.
        reading: the results of the loop.
        all_shared: whether all loaders of the loop are sharded.
    """
    for name, node in reading.unclear.items():
        conversion.own_reads |= set(reads_after(conversion, reading.loop, name))
        conversion.left(
            node, "metric", f"{name} is what rank 0 has seen in its own share of the data",
            f"mean({name}, count), reduce({name}, op=\"sum\") or gather({name}) where a number of all ranks is wanted",
        )  # fmt: skip
    names = [*reading.sums, *(each for each in reading.counts if _is_divisor(conversion, reading, each))]
    if not (reading.sums or reading.lists):
        return
    if not all_shared or (reading.why and not reading.is_training):
        for name in (*reading.sums, *reading.lists):
            where = reads_after(conversion, reading.loop, name)[0]
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
        for read in reads_after(conversion, reading.loop, name):
            call = conversion.script.parent(conversion.script.parent(read) or read)
            if call is not None:
                conversion.wrap(call, "gather", ", interleave=True")
                conversion.done(call, "gather", f"{name} of all ranks, in the order of the data")


def _is_divisor(conversion: Conversion, reading: Reading, name: str) -> bool:
    """Return whether later code divides by a count, or the function returns it so that a caller may."""
    return any(
        _divides(conversion, each) or isinstance(conversion.script.small_statement_of(each), cst.Return)
        for each in reads_after(conversion, reading.loop, name)
    )


def _divides(conversion: Conversion, node: cst.CSTNode) -> bool:
    """Return whether a node is a divisor."""
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
    """Yield the numbers of batches by which a loop's sums are divided later, also by callers of its function."""
    iterated = conversion.facts.iterated(reading.loop)
    return _divisors(conversion, reading, lambda node: _is_length(conversion, node, iterated))


def _divisors(conversion: Conversion, reading: Reading, fits: Callable[[cst.CSTNode], bool]) -> Iterator[cst.CSTNode]:
    """Yield the fitting expressions, and names of such, by which a loop's sums are divided later."""
    script, values = conversion.script, conversion.facts.values
    reads = {each for name in reading.sums for each in reads_after(conversion, reading.loop, name)}
    targets = {script.small_statement_of(read) for read in reads} | {script.statement_of(read) for read in reads}
    targets |= {script.small_statement_of(each) for each in _handed_back(conversion, reading, reads)}
    for statement in targets:
        if isinstance(statement, (cst.SimpleStatementLine, cst.If, cst.For, cst.While, cst.With, cst.Try)):
            continue
        for node in script.expressions(statement):
            if script.inside(node, reading.loop) or not _divides(conversion, node):
                continue
            if fits(node):
                yield node
            elif isinstance(node, cst.Name):
                made = given[0].value if len(given := values.bound(node)) == 1 else None
                if made and any(fits(each) for each in script.expressions(made)):
                    yield node


def dataset_lengths(conversion: Conversion, reading: Reading) -> list[cst.CSTNode]:
    """Return the lengths of a loop's dataset by which its sums are divided later, also by callers of its function."""
    facts = conversion.facts
    loaders = {each for each in facts.loader_of(facts.iterated(reading.loop)) if each is not None}
    return list(dict.fromkeys(_divisors(conversion, reading, lambda node: is_dataset_length(facts, node, loaders))))


def is_dataset_length(facts: ScriptFacts, node: cst.CSTNode, loaders: set[cst.Call]) -> bool:
    """Return whether an expression is the length of the dataset of one of some loaders."""
    if not isinstance(node, cst.Call) or not facts.script.is_a(node, "builtins.len") or len(node.args) != 1:
        return False
    given = node.args[0].value
    if isinstance(given, cst.Attribute) and given.attr.value == "dataset":
        return bool(loaders & set(facts.loader_of(given.value)))
    data = [argument(each, "dataset", 0) for each in loaders]
    return path_of(given) is not None and any(
        path_of(each) == path_of(given) and facts.script.function_of(each) is facts.script.function_of(node)
        for each in data
        if each is not None
    )


def note_lengths(conversion: Conversion, readings: Iterable[Reading]) -> None:
    """Note divisors that are still a rank's own number of batches, for loops whose sums are added up."""
    for node in dict.fromkeys(each for one in readings if one.is_added for each in _other_lengths(conversion, one)):
        text = conversion.script.code(node)
        conversion.left(
            node, "metric", f"{text} counts this rank's batches alone, and a sum of all ranks may be divided by it",
            f"reduce({text}, op=\"sum\"), outside of the loop",
        )  # fmt: skip


def _other_lengths(conversion: Conversion, reading: Reading) -> Iterator[cst.CSTNode]:
    """Yield the other divisors that are the number of batches, except those of progress within the loop."""
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
    """Yield the calls whose function returns the loop's sums, and the reads of the names assigned from them."""
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
    """Return whether an expression is the number of batches of a loader, under any of its names."""
    if not isinstance(node, cst.Call) or not conversion.script.is_a(node, "builtins.len") or len(node.args) != 1:
        return False
    given, facts = node.args[0].value, conversion.facts
    loaders = {each for each in facts.loader_of(of) if each is not None}
    is_named = conversion.script.function_of(node) is conversion.script.function_of(of) and path_of(of) is not None
    return (is_named and path_of(given) == path_of(of)) or bool(loaders & set(facts.loader_of(given)))
