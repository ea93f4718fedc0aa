"""Convert scripts with ``nn.DataParallel``, whose batch is that of all devices together."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.names import DATA_PARALLEL
from distwrap.convert.script import path_of
from distwrap.convert.sources.ddp import keep_options, use_the_model_itself
from distwrap.convert.sources.plain import convert_plain


def is_data_parallel(conversion: Conversion) -> bool:
    """Return whether a script trains with DataParallel."""
    return any(conversion.script.calls(*DATA_PARALLEL))


def convert_data_parallel(conversion: Conversion) -> bool:
    """Convert a loop with DataParallel; return whether this succeeded."""
    script = conversion.script
    conversion.global_batch = True
    for call in list(script.calls(*DATA_PARALLEL)):
        if not call.args or any(each.star for each in call.args) or not conversion.may_change(call):
            conversion.unsure(call, "wrap_model", "its arguments are not clear", "wrap_model(model)")
            return False
        conversion.wrapped_expressions.add(call)
        statement = script.small_statement_of(call)
        if isinstance(statement, cst.Assign):
            conversion.wrapped |= {path_of(each.target) or "" for each in statement.targets}
        branch = _branch(conversion, call)
        if branch is not None and isinstance(statement, cst.Assign):
            target = script.code(statement.targets[0].target)
            text = conversion.call("wrap_model", script.code(call.args[0].value))
            conversion.edits.replace(branch, f"{target} = {text}")
        else:
            keep_options(conversion, call, ("device_ids", "output_device", "dim"))
            conversion.rename_call(call, "wrap_model")
        conversion.done(call, "wrap_model", "one process a device, in the place of threads in one process")
    use_the_model_itself(conversion, DATA_PARALLEL)
    return convert_plain(conversion)


def _branch(conversion: Conversion, call: cst.Call) -> cst.If | None:
    """Return the ``if`` around a wrapper that tests the number of devices and otherwise only prints, or None."""
    script = conversion.script
    branch = next((each for each in script.ancestors(call) if isinstance(each, (cst.If, cst.FunctionDef))), None)
    if not isinstance(branch, cst.If) or branch.orelse is not None or isinstance(script.parent(branch), cst.If):
        return None
    if "gpu" not in script.code(branch.test).lower() and "device_count" not in script.code(branch.test):
        return None
    statement = script.statement_of(call)
    others = [each for each in branch.body.body if each is not statement]
    prints = [
        isinstance(each, cst.SimpleStatementLine)
        and isinstance(each.body[0], cst.Expr)
        and script.is_a(each.body[0].value, "builtins.print")
        for each in others
    ]
    return branch if all(prints) else None
