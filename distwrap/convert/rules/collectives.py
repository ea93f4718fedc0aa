"""Convert torch's own collectives to distwrap's if the change is simple."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.script import argument, constant, keyword_of, path_of

_OPS = {"SUM": "sum", "AVG": "mean", "MIN": "min", "MAX": "max"}
_OTHERS = {
    "all_gather": "gather(tensor), of all ranks in one tensor",
    "all_gather_into_tensor": "gather(tensor)",
    "all_gather_object": "gather_object(value), a list",
    "gather": "gather(tensor), on every rank",
    "gather_object": "gather_object(value), on every rank",
    "broadcast_object_list": "broadcast(value)",
    "reduce_scatter": "reduce(tensor), and the rank's part of it",
    "scatter": "broadcast(tensor), and the rank's part of it",
    "all_to_all": "gather(tensor), and the rank's part of it",
    "monitored_barrier": "barrier()",
}


def convert_collectives(conversion: Conversion) -> None:
    """Convert barriers, and reductions and broadcasts of local variables; note the other collectives."""
    script = conversion.script
    for call in list(script.calls("torch.distributed.barrier")):
        if conversion.may_change(call):
            conversion.edits.replace(call, conversion.call("barrier"), drops=True)
            conversion.done(call, "collective", "does nothing in one process")
    for name in ("all_reduce", "reduce", "broadcast"):
        for call in list(script.calls(f"torch.distributed.{name}")):
            if conversion.may_change(call):
                _in_place(conversion, call, name)
    for name, fix in _OTHERS.items():
        for call in list(script.calls(f"torch.distributed.{name}")):
            conversion.left(call, "collective", "it needs a process group, so it fails in one process", fix)


def _in_place(conversion: Conversion, call: cst.Call, name: str) -> None:
    script = conversion.script
    statement = script.small_statement_of(call)
    tensor = argument(call, "tensor", 0)
    path = path_of(tensor)
    fix = f"{path or 'x'} = {'broadcast' if name == 'broadcast' else 'reduce'}({path or 'x'})"
    waits = argument(call, "async_op")
    extra = [arg for arg in call.args[1:] if keyword_of(arg) == "group"]
    extra += [arg for arg in call.args[1:] if arg.value is waits and constant(waits) is not False]
    is_own = path is not None and bool(conversion.facts.values.bindings.get((script.function_of(call), path)))
    if not isinstance(statement, cst.Expr) or statement.value is not call or not is_own or extra or tensor is None:
        conversion.left(call, "collective", "it changes a tensor in place, which others may hold too", fix)
        return
    if name == "broadcast":
        source = argument(call, "src", 1)
        value = f"{path}, {script.code(source) if source is not None else 0}"
        text = f"{path} = {conversion.call('broadcast', value)}"
    else:
        given = argument(call, "op", 1 if name == "all_reduce" else 2)
        op = "sum" if given is None else _OPS.get((path_of(given) or "").split(".")[-1])
        if op is None:
            conversion.left(call, "collective", "reduce() has the mean, sum, minimum and maximum alone", fix)
            return
        arguments = f'{path}, op="{op}"'
        text = f"{path} = {conversion.call('reduce', arguments)}"
    conversion.edits.replace(call, text)
    conversion.done(call, "collective", "the same, and nothing in one process")
