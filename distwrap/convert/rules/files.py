"""Convert checkpoints: written once, whole or not at all, and read by the safe loader."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.rules.branches import own_test
from distwrap.convert.script import argument, constant, keywords_of, path_of
from distwrap.convert.values import root_of


def save_and_load(conversion: Conversion) -> None:
    """Convert ``torch.save`` and ``torch.load`` if it is clear what they write or read."""
    for call in list(conversion.script.calls("torch.save")):
        if conversion.may_change(call) and conversion.on_ranks(call):
            _save(conversion, call)
    for call in list(conversion.script.calls("torch.load")):
        if conversion.may_change(call) and conversion.on_ranks(call):
            _load(conversion, call)


def _save(conversion: Conversion, call: cst.Call) -> None:
    script = conversion.script
    state, path = argument(call, "obj", 0), argument(call, "f", 1)
    statement = script.small_statement_of(call)
    guarded = script.is_of_some_ranks(call)
    block = _block_of(conversion, call)
    is_alone = isinstance(script.parent(call), cst.Expr)
    if block is not None and is_alone and state is not None and path is not None and len(call.args) == 2:
        _save_to_open_file(conversion, call, block, state)
    elif state is None or path is None or len(call.args) != 2 or not _is_path(conversion, path):
        conversion.unsure(call, "save", "it does not write to a path", "save(state, path), or under is_rank_zero()")
    elif is_alone and _is_plain_state(conversion, state) and (own := own_test(conversion, call)) is not None:
        if conversion.edits.has_line_of_its_own(statement):
            conversion.under_rank_zero(statement)
        _write_alone(conversion, call)
        conversion.left(
            own, "save", "each rank's own data decides whether a file is written, so that of rank 0 alone does",
            "the mean over the ranks in the test, as of mean(loss, count)",
        )  # fmt: skip
    elif _is_plain_state(conversion, state):
        if is_alone and _is_called_by_some(conversion, call) and conversion.edits.has_line_of_its_own(statement):
            conversion.under_rank_zero(statement)
            guarded = True
        if guarded:
            _write_alone(conversion, call)
            conversion.done(call, "save", "rank 0 alone writes it, whole or not at all")
        else:
            conversion.rename_call(call, "save")
            conversion.done(call, "save", "rank 0 writes it, whole or not at all, and the others wait")
    elif guarded or _is_followed_up(conversion, call, path):
        conversion.left(call, "save", "one rank alone writes it already", "save(state, path), of plain values")
    elif (
        isinstance(statement, cst.Expr) and statement.value is call and conversion.edits.has_line_of_its_own(statement)
    ):
        conversion.under_rank_zero(statement)
        conversion.done(call, "save", "rank 0 alone writes it; what it holds may be more than the safe loader takes")
        _note_what_goes_wrong(conversion, call)
    else:
        conversion.unsure(call, "save", "all ranks would write one file", "save(state, path)")


def _write_alone(conversion: Conversion, call: cst.Call) -> None:
    """Convert a save to which the other ranks do not come."""
    conversion.rename_call(call, "save")
    conversion.edits.add_argument(call, "alone=True")


def _note_what_goes_wrong(conversion: Conversion, call: cst.Call) -> None:
    """Note where rank 0's ``torch.save`` may fail, or its file may be read too early."""
    script = conversion.script
    moved = [each for each in script.tree.body if isinstance(each, cst.ClassDef) and conversion.on_ranks(each)]
    if conversion.reach.entry is None and moved:
        conversion.left(
            moved[0], "save", f"it becomes main()'s own, and line {script.line(call)} can write no object of it",
            "the class above the code that moves into main()",
        )  # fmt: skip
    loads = [each for each in script.calls("torch.load") if conversion.on_ranks(each)]
    if any(script.span(each) > script.span(call) for each in loads):  # an earlier load resumes a run
        conversion.left(
            call, "save", "a load in the same run does not wait for it",
            "save(state, path), of plain values; or barrier() before the load",
        )  # fmt: skip


def _block_of(conversion: Conversion, call: cst.Call) -> cst.With | None:
    """Return the ``with open(path, "wb") as f:`` around a single statement that writes or reads ``f``, or None."""
    script = conversion.script
    line = script.statement_of(call)
    match line, script.parent(script.parent(line) or line):
        case (
            cst.SimpleStatementLine(body=[_]),
            cst.With(
                items=[cst.WithItem(item=cst.Call(args=[_, _]) as opened, asname=cst.AsName(name=name))],
                body=cst.IndentedBlock(body=[_]),
            ) as block,
        ):
            file = path_of(argument(call, "f", len(call.args) - 1))
            is_its = script.is_a(opened, "builtins.open") and file is not None and path_of(name) == file
            return block if is_its and conversion.edits.has_line_of_its_own(block) else None
    return None


def _save_to_open_file(conversion: Conversion, call: cst.Call, block: cst.With, state: cst.BaseExpression) -> None:
    script, opened = conversion.script, block.items[0].item
    assert isinstance(opened, cst.Call)
    where = script.code(opened.args[0].value)
    if _is_plain_state(conversion, state):
        alone = ", alone=True" if script.is_of_some_ranks(call) else ""
        written = conversion.call("save", f"{script.code(state)}, {where}{alone}")
        conversion.done(block, "save", "rank 0 writes it, whole or not at all, and the others wait")
    else:
        written = f"if {conversion.call('is_rank_zero')}: torch.save({script.code(state)}, {where})"
        conversion.done(block, "save", "rank 0 alone writes it, whatever the safe loader may think of it")
    conversion.edits.replace_span(script.span(block)[0], script.span(call)[1], written)


def _is_followed_up(conversion: Conversion, call: cst.Call, path: cst.BaseExpression) -> bool:
    """Return whether a save's function uses the file again, and its caller tests the rank."""
    script, function = conversion.script, conversion.script.function_of(call)
    name = path_of(path)
    others = [
        each
        for each in script.find(cst.Call, function)
        if each is not call and any(path_of(arg.value) == name for arg in each.args)
    ]
    return bool(others and name) and _is_called_by_some(conversion, call)


def _is_called_by_some(conversion: Conversion, node: cst.CSTNode) -> bool:
    """Return whether a caller of a node's function tests the rank."""
    function = conversion.script.function_of(node)
    callers = conversion.facts.values.callers(function) if function is not None else []
    return bool(callers) and all(map(conversion.script.is_of_some_ranks, callers))


def _is_path(conversion: Conversion, node: cst.BaseExpression) -> bool:
    """Return whether a file is given as a path, not as a file object."""
    script = conversion.script
    for source in conversion.facts.values.sources(node):
        if source is None and isinstance(node, cst.Name):
            found = conversion.facts.values.bound(node)
            if any(isinstance(each.statement, cst.With) for each in found):
                return False
        if isinstance(source, cst.Call) and script.is_a(source, "io.BytesIO", "builtins.open"):
            return False
    return True


def _is_plain_state(conversion: Conversion, node: cst.BaseExpression, depth: int = 4) -> bool:
    """Return whether a state certainly holds tensors and plain values, and no whole model."""
    script = conversion.script
    if depth == 0:
        return False
    if isinstance(node, (cst.Dict,)):
        return all(
            isinstance(each, cst.DictElement) and _is_plain_state(conversion, each.value, depth - 1)
            for each in node.elements
        )
    if isinstance(node, (cst.List, cst.Tuple)):
        return all(_is_plain_state(conversion, each.value, depth - 1) for each in node.elements)
    if constant(node) is not ... or isinstance(node, (cst.FormattedString, cst.BinaryOperation, cst.Comparison)):
        return True
    if isinstance(node, cst.Call):
        if isinstance(node.func, cst.Attribute) and node.func.attr.value in (
            "state_dict",
            "item",
            "tolist",
            "detach",
            "cpu",
        ):
            return True
        if script.is_a(node, "builtins.dict"):
            return all(
                arg.keyword is not None and _is_plain_state(conversion, arg.value, depth - 1) for arg in node.args
            )
        return script.is_a(
            node, "builtins.float", "builtins.int", "builtins.str", "builtins.len", "torch.get_rng_state", "torch.cat",
            "torch.tensor", "torch.zeros",
        )  # fmt: skip
    path = path_of(node)
    if path is None:
        return False
    found = conversion.facts.values.bound(node)
    function = script.function_of(node)
    position = conversion.facts.values.parameter(function, path)
    if not found and isinstance(function, cst.FunctionDef) and position is not None:
        given = conversion.facts.values.given(function, path, position)
        return bool(given) and all(each is not None and _is_plain_state(conversion, each, depth - 1) for each in given)
    if found and all(isinstance(each.statement, (cst.For, cst.AugAssign)) for each in found):
        return True
    values = [each.value for each in found if not isinstance(each.statement, (cst.For, cst.AugAssign))]
    for assign in script.find(cst.Assign, script.function_of(node)):  # state["epoch"] = epoch
        if any(
            isinstance(each.target, cst.Subscript) and path_of(each.target.value) == path for each in assign.targets
        ):
            values.append(assign.value)
    return bool(values) and all(
        each is not None and (path_of(root_of(each)) == path or _is_plain_state(conversion, each, depth - 1))
        for each in values
    )


def _load(conversion: Conversion, call: cst.Call) -> None:
    path = argument(call, "f", 0)
    if path is None or not _is_path(conversion, path):
        block = _block_of(conversion, call)
        if block is None or path is None or not _is_state(conversion, call):
            conversion.left(call, "load", "every rank reads it by itself, from a file that is open already")
            return
        opened = block.items[0].item
        assert isinstance(opened, cst.Call)
        conversion.edits.replace_span(
            conversion.script.span(block)[0], conversion.script.span(block.body.body[0])[0], ""
        )
        conversion.edits.replace(path, conversion.script.code(opened.args[0].value))
    keywords = keywords_of(call.args[1:])
    if len(call.args) - 1 == len(keywords) and keywords <= {"map_location"} and _is_state(conversion, call):
        if "map_location" not in keywords:
            conversion.done(
                call, "load", "read by the safe loader, onto the CPU, so that ranks do not crowd one device"
            )
        else:
            conversion.done(call, "load", "read by the safe loader")
        conversion.rename_call(call, "load")
        return
    conversion.left(
        call, "load", "every rank reads it by itself, to where it was saved", "load(path), if it holds plain values",
    )  # fmt: skip


def _is_state(conversion: Conversion, call: cst.Call) -> bool:
    """Return whether a loaded object is used as a state: passed to ``load_state_dict``, or read by key."""
    script = conversion.script
    above = script.parent(call)
    if isinstance(above, cst.Arg):
        return _is_state_dict_call(conversion, above)
    statement = script.assignment_of(call)
    if statement is None:
        return False
    name = statement.targets[0].target
    if not isinstance(name, cst.Name):  # an attribute may be read in any function
        return False
    reads = [
        script.parent(node)
        for node in script.reads(name.value, script.function_of(call))
        if script.span(node)[0] > script.span(statement)[1]
    ]
    return bool(reads) and all(
        isinstance(each, (cst.Subscript, cst.ComparisonTarget))
        or (isinstance(each, cst.Attribute) and each.attr.value in ("get", "keys", "items"))
        or (isinstance(each, cst.Arg) and _is_state_dict_call(conversion, each))
        for each in reads
    )


def _is_state_dict_call(conversion: Conversion, arg: cst.Arg) -> bool:
    holder = conversion.script.parent(arg)
    return isinstance(holder, cst.Call) and (path_of(holder.func) or "").endswith("load_state_dict")
