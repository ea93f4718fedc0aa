"""Convert what writes checkpoints: written once, whole or not at all."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.script import argument, constant, is_about_rank, path_of
from distwrap.convert.shares import is_of_own, own_names


def save_once(conversion: Conversion) -> None:
    """Let `save` write what surely is plain, and rank 0 alone anything else; name loads that crowd a device."""
    script = conversion.script
    early = [
        script.span(call)
        for call in list(script.calls("torch.save"))
        if conversion.may_change(call) and conversion.on_ranks(call) and not _save(conversion, call)
    ]
    for call in filter(conversion.on_ranks, script.calls("torch.load")):
        if any(place < script.span(call) for place in early):
            conversion.todo(call, "load", "rank 0 may still write what is read here", "barrier() above this line")
        elif argument(call, "map_location", 1) is None:
            conversion.left(call, "load", "every rank loads to where it was saved", 'map_location="cpu"')
    for assign in conversion.script.find(cst.Assign):
        if conversion.on_ranks(assign) and _is_dated(conversion, assign.value):
            name = conversion.script.code(assign.targets[0].target)
            conversion.todo(assign, "file", "ranks read the clock apart", f"{name} = broadcast({name}) below")


def _is_dated(conversion: Conversion, node: cst.CSTNode) -> bool:
    """Return whether an expression is a text with the time in it, as of a file's name."""
    script = conversion.script
    for call in script.find(cst.Call, node):
        of_clock = any(
            name.startswith(("time.", "datetime."))
            for each in script.find(cst.Call, call)
            for name in script.names(each.func)
        )
        formats = (path_of(call.func) or script.code(call.func)).endswith("strftime")
        if of_clock and (formats or isinstance(script.parent(call), cst.FormattedStringExpression)):
            return True
    return False


def _save(conversion: Conversion, call: cst.Call) -> bool:
    """Convert one save; return whether no rank goes on before the file is written."""
    script, state, path = conversion.script, argument(call, "obj", 0), argument(call, "f", 1)
    statement = script.small_statement_of(call)
    is_alone = isinstance(statement, cst.Expr) and statement.value is call
    by_some = script.is_of_some_ranks(call) or _is_called_by_some(conversion, call)
    test = _own_test(conversion, call)
    if state is not None and path_of(state) in conversion.wrapped:
        conversion.wrap(state, "unwrap_model")
    if is_about_rank(script.code(path or call)):
        conversion.left(call, "save", "it is a file of each rank's own")
    elif path is None or not _is_path(conversion, path):
        conversion.left(call, "save", "the file is open already")
        return False
    elif test is None and len(call.args) == 2 and state is not None and _is_plain(conversion, state):
        conversion.rename_call(call, "save")
        if by_some:
            conversion.edits.add_argument(call, "alone=True")
        conversion.done(
            call, "save", "rank 0 writes it, whole or not at all" + ("" if by_some else "; the others wait")
        )
    elif by_some:
        conversion.left(call, "save", "one rank alone writes it already")
    elif is_alone and conversion.edits.has_line_of_its_own(statement):
        conversion.under_rank_zero(statement)
        conversion.done(call, "save", "rank 0 alone writes it")
        if test is not None:
            conversion.left(
                test, "save", "each rank's own data decides whether a file is written, so that of rank 0 alone does",
                "the mean over the ranks in the test, as of mean(loss)",
            )  # fmt: skip
        return False
    else:
        conversion.todo(call, "save", "all ranks would write one file", "save(state, path)")
    return True


def _own_test(conversion: Conversion, node: cst.CSTNode) -> cst.If | None:
    """Return the test around a node by which a training loop's own data decides, or None."""
    script, facts = conversion.script, conversion.facts
    tests = [each for each in script.ancestors(node) if isinstance(each, cst.If)]
    return next(
        (
            test
            for each in facts.training_loops
            for test in tests
            if script.inside(test, each.loop.body) and is_of_own(script, test.test, own_names(script, facts, each.loop))
        ),
        None,
    )


def _is_called_by_some(conversion: Conversion, node: cst.CSTNode) -> bool:
    """Return whether all callers of a node's function test the rank."""
    function = conversion.script.function_of(node)
    callers = conversion.facts.values.callers(function) if function is not None else []
    return bool(callers) and all(map(conversion.script.is_of_some_ranks, callers))


def _is_path(conversion: Conversion, node: cst.BaseExpression | None) -> bool:
    """Return whether a file is given as a path, not as a file object."""
    script = conversion.script
    found = conversion.facts.values.bound(node) if isinstance(node, cst.Name) else []
    made = [each.value for each in found]
    return not any(isinstance(each.statement, cst.With) for each in found) and not any(
        script.is_a(each, "io.BytesIO", "builtins.open") for each in made if isinstance(each, cst.Call)
    )


def _is_plain(conversion: Conversion, node: cst.BaseExpression, depth: int = 3) -> bool:
    """Return whether a state surely holds tensors and plain values, which the safe loader takes."""
    script = conversion.script
    match node:
        case cst.Dict(elements=elements) | cst.List(elements=elements) | cst.Tuple(elements=elements):
            return all(depth > 0 and _is_plain(conversion, each.value, depth - 1) for each in elements)
        case cst.FormattedString() | cst.BinaryOperation() | cst.Comparison():
            return True
        case cst.Call(func=cst.Attribute(attr=cst.Name(value="state_dict" | "item" | "tolist" | "detach" | "cpu"))):
            return True
        case cst.Call():
            return script.is_a(
                node, "builtins.float", "builtins.int", "builtins.str", "builtins.len", "torch.get_rng_state",
                "torch.cat", "torch.tensor", "torch.zeros",
            )  # fmt: skip
        case cst.Name() if constant(node) is ...:
            found = conversion.facts.values.bound(node)
            values = [each.value for each in found if not isinstance(each.statement, (cst.For, cst.AugAssign))]
            return bool(found) and all(
                depth > 0 and each is not None and _is_plain(conversion, each, depth - 1) for each in values
            )
    return constant(node) is not ...
