"""Convert scripts whose ranks ``torch.multiprocessing.spawn`` starts."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.names import SPAWN
from distwrap.convert.rules.ddp import convert_body
from distwrap.convert.rules.entry import write_entry
from distwrap.convert.script import Function, argument, is_docstring, keywords_of, path_of


def is_spawn(conversion: Conversion) -> bool:
    """Return whether a script starts its ranks with ``mp.spawn``."""
    return any(conversion.script.calls(*SPAWN))


def convert_spawn(conversion: Conversion) -> bool:
    """Convert a script that spawns its ranks; return whether this succeeded."""
    script, facts = conversion.script, conversion.facts
    calls = list(script.calls(*SPAWN))
    given = {path_of(argument(call, "fn", 0)) for call in calls}
    name = given.pop() if len(given) == 1 else None
    function = facts.values.functions.get(name or "")
    others = [node for node in script.reads(name) if not any(script.inside(node, call) for call in calls)]
    if function is None or others or not function.params.params:
        conversion.unsure(
            calls[0], "spawn", "the function that it starts is not one of this file, or is called elsewhere too",
            "@distributed(nprocs=...) on the function, and a plain call",
        )  # fmt: skip
        return False
    if any(not isinstance(script.small_statement_of(call), cst.Expr) for call in calls) or not all(
        _can_replace(call) for call in calls
    ):
        conversion.unsure(calls[0], "spawn", "its arguments or its value are not plain", "a plain call of the function")
        return False
    conversion.begin_at(function)
    first = function.params.params[0].name.value
    conversion.rank_names.add(first)
    for call in calls:
        _call_plainly(conversion, call, function)
    _drop_parameter(conversion, function, first)
    convert_body(conversion, joins=False)
    write_entry(conversion, [])
    return True


def _can_replace(call: cst.Call) -> bool:
    return keywords_of(call.args) <= {"fn", "args", "nprocs", "join"} and not any(arg.star for arg in call.args)


def _call_plainly(conversion: Conversion, call: cst.Call, function: Function) -> None:
    script = conversion.script
    nprocs, args = argument(call, "nprocs", 2), argument(call, "args", 1)
    start = f"{function.name.value}.options(nprocs={1 if nprocs is None else script.code(nprocs)})("
    (first, last), edits = script.span(call), conversion.edits
    if isinstance(args, cst.Tuple) and args.elements:  # which may have edits of their own
        edits.replace_span(first, script.span(args.elements[0].value)[0], start, drops=True)
        edits.replace_span(script.span(args.elements[-1].value)[1], last, ")", drops=True)
    else:
        edits.replace(call, f"{start}{'' if args is None else f'*{script.code(args)}'})", drops=True)
    conversion.done(call, "spawn", "starts the ranks, and brings back rank 0's value, and any rank's exception")


def _drop_parameter(conversion: Conversion, function: Function, first: str) -> None:
    script = conversion.script
    params = function.params.params
    start = script.span(params[0])[0]
    end = script.span(params[1])[0] if len(params) > 1 else script.span(params[0])[1]
    conversion.edits.replace_span(start, end, "")
    body = function.body.body
    used = any(script.reads(first, function.body))
    index = 1 if is_docstring(body[0]) and len(body) > 1 else 0
    if used:
        own = "rank" if _is_global(conversion, first) else "local_rank"
        conversion.edits.line_before(body[index], f"{first} = {conversion.call(own)}")
    conversion.done(function, "spawn", f"{first} is no argument any more, since each rank knows its own")


def _is_global(conversion: Conversion, first: str) -> bool:
    """Return whether the number from spawn is the global rank, as on one node, rather than the local rank."""
    script = conversion.script
    return not any(
        isinstance(assign.value, cst.BinaryOperation)
        and (path_of(assign.targets[0].target) or "").split(".")[-1] in ("rank", "global_rank")
        and any(script.reads(first, assign.value))
        for assign in script.find(cst.Assign)
    )
