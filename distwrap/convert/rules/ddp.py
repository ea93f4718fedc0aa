"""Convert scripts that use torch's DistributedDataParallel directly and that torchrun starts."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.names import INIT, PROCESSES, WRAPPER
from distwrap.convert.rules.devices import use_own_device
from distwrap.convert.rules.files import save_once
from distwrap.convert.rules.loaders import shard_instead_of_sampling
from distwrap.convert.rules.models import use_bare_models
from distwrap.convert.script import Function, argument, constant, keyword_of, path_of
from distwrap.convert.values import root_of

_DROPPED = ("device_ids", "output_device", "process_group", "dim")
_ENDS = ("torch.distributed.destroy_process_group", "torch.cuda.set_device")
_RANKS = {
    "torch.distributed.get_rank": "rank",
    "torch.distributed.get_world_size": "world_size",
    "torch.distributed.get_node_local_rank": "local_rank",
}
_VARIABLES = {
    "RANK": "rank", "LOCAL_RANK": "local_rank", "WORLD_SIZE": "world_size", "LOCAL_WORLD_SIZE": "local_world_size",
    "GROUP_RANK": "node_rank", "NODE_RANK": "node_rank",
}  # fmt: skip
_SET = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")
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


def is_ddp(conversion: Conversion) -> bool:
    """Return whether a script itself joins a process group or wraps models for one."""
    return any(conversion.script.calls(*WRAPPER, *INIT))


def convert_ddp(conversion: Conversion) -> bool:
    """Convert a script that torchrun starts, and still does; return whether this succeeded."""
    script = conversion.script
    for call in script.calls(*WRAPPER):
        if _is_conditional(conversion, call):
            conversion.unsure(
                call, "wrap_model", "under this condition some runs do not wrap the model, and a rank whose "
                "model is not wrapped trains alone", "where the script runs with ranks or without, the way with ranks "
                "alone, which is right in one process too; then convert again",
            )  # fmt: skip
            return False
    for call in script.calls(*PROCESSES):
        conversion.unsure(
            call, "entry", "the script starts its ranks by itself, and each of them would start ranks again",
            "@distributed(nprocs=...) on the function that they run, and a plain call of it",
        )  # fmt: skip
        return False
    convert_body(conversion, joins=True)
    return True


def _is_conditional(conversion: Conversion, call: cst.Call) -> bool:
    """Return whether a model is wrapped only under a condition."""
    script = conversion.script
    for each in script.ancestors(call):
        if isinstance(each, (cst.FunctionDef, cst.ClassDef)):
            return False
        if isinstance(each, cst.IfExp):
            return True
        if isinstance(each, cst.If) and each is not conversion.facts.guard:
            branches: list[cst.CSTNode] = [each.body, *([each.orelse] if each.orelse is not None else [])]
            if len(branches) < 2 or not all(any(script.calls(*WRAPPER, within=branch)) for branch in branches):
                return True
    return False


def convert_body(conversion: Conversion, *, joins: bool) -> None:
    """Convert everything except how the script starts.

    Args:
        conversion: the current conversion.
        joins: whether the script's ranks meet where it says so; otherwise a decorated function's have met already.
    """
    _wrap(conversion)
    use_the_model_itself(conversion, WRAPPER)
    shard_instead_of_sampling(conversion)
    _ask_for_rank(conversion)
    _convert_collectives(conversion)
    for assign in conversion.script.find(cst.Assign):
        if path_of(assign.value) in conversion.rank_names:  # args.gpu = gpu
            conversion.rank_names |= {path_of(each.target) or "" for each in assign.targets}
    use_own_device(conversion)
    _drop_group(conversion, joins)
    save_once(conversion)
    use_bare_models(conversion)
    _no_sync(conversion)


def _no_sync(conversion: Conversion) -> None:
    """Convert ``model.no_sync()``, which an unwrapped model in one process does not have."""
    script = conversion.script
    for call, attribute in list(script.method_calls("no_sync")):
        path, sources = path_of(attribute.value), list(conversion.facts.values.sources(attribute.value))
        is_wrapped = bool(sources) and all(
            each is not None and script.is_a(root_of(each), *WRAPPER) for each in sources
        )
        if path is not None and is_wrapped and not call.args and conversion.may_change(call):
            conversion.edits.replace(call, conversion.call("no_sync", path))
            conversion.done(call, "no_sync", "gradients stay on their rank in here, and it does nothing in one process")
        else:
            conversion.left(
                call, "no_sync", "it works on a wrapped model on several ranks, but a bare model, in one process, has "
                "none", "with no_sync(model), or for batch, window in accumulate(loader, steps, model)",
            )  # fmt: skip


def _wrap(conversion: Conversion) -> None:
    script = conversion.script
    for call in list(script.calls(*WRAPPER)):
        if not conversion.may_change(call) or not call.args or any(each.star for each in call.args):
            conversion.unsure(call, "wrap_model", "its arguments are not clear", "wrap_model(model)")
            continue
        gone = [each for each in call.args[1:] if keyword_of(each) in ("", *_DROPPED)]
        conversion.edits.remove_arguments(call, gone)
        conversion.rename_call(call, "wrap_model")
        assign = script.assignment_of(call)
        conversion.wrapped |= {path_of(assign.targets[0].target) or ""} if assign is not None else set()
        conversion.done(
            call, "wrap_model", "a wrapped model is DistributedDataParallel, and answers like the model itself"
        )


def use_the_model_itself(conversion: Conversion, wrappers: tuple[str, ...]) -> None:
    """Replace ``model.module.x`` by ``model.x``, and ``model.module`` alone by ``unwrap_model(model)``."""
    script = conversion.script
    for node in list(script.find(cst.Attribute)):
        if node.attr.value != "module" or not conversion.may_change(node) or path_of(node) is None:
            continue
        sources = list(conversion.facts.values.sources(node.value))
        known = any(script.is_a(root_of(each), *wrappers) for each in sources if each is not None)
        if not known and not all(each is None for each in sources):
            continue
        if not known:
            conversion.unsure(node, "module", "what it is a module of is not clear", "the model without .module")
        elif isinstance(script.parent(node), cst.Attribute):
            conversion.edits.replace_span(script.span(node.value)[1], script.span(node)[1], "")
            conversion.done(
                node, "module", "a wrapped model has the names of the model itself, and keys without prefix"
            )
        else:
            conversion.edits.insert(script.span(node)[0], f"{conversion.helpers.name('unwrap_model')}(")
            conversion.edits.replace_span(script.span(node.value)[1], script.span(node)[1], ")")
            conversion.done(node, "module", "the model itself")
    _load_with_prefix(conversion, wrappers)


def _load_with_prefix(conversion: Conversion, wrappers: tuple[str, ...]) -> None:
    """Let a wrapped model load checkpoints from before the conversion, whose keys begin with ``module.``."""
    script, values = conversion.script, conversion.facts.values
    for call, attribute in list(script.method_calls("load_state_dict")):
        path, start = path_of(attribute.value), script.span(call)[0]
        found = values.bindings.get((script.function_of(call), path or ""), [])
        before = [each for each in found if script.span(each.target)[0] < start]
        last = max(before, key=lambda each: script.span(each.target), default=None)
        if last is None or last.value is None or not call.args or not conversion.may_change(call):
            continue
        if script.is_a(root_of(last.value), *wrappers):
            conversion.wrap(call.args[0].value, "strip_module_prefix")
            conversion.done(
                call, "module", "checkpoints from before the conversion have a prefix; those after have none"
            )


def _ask_for_rank(conversion: Conversion) -> None:
    script = conversion.script
    for name, helper in _RANKS.items():
        for call in list(script.calls(name)):
            if conversion.may_change(call) and not call.args and not _is_of_dropped(conversion, call):
                _query(conversion, call, helper)
    for node in list(script.expressions()):
        variable = _variable(conversion, node)
        if variable is not None and variable in _VARIABLES and conversion.may_change(node):
            above = script.parent(node)
            read = script.parent(above) if isinstance(above, cst.Arg) else None
            is_read = not isinstance(above, (cst.AssignTarget, cst.Del))
            if isinstance(read, cst.Call) and script.is_a(read, "builtins.int"):
                _query(conversion, read, _VARIABLES[variable])
            elif is_read and not isinstance(above, cst.ComparisonTarget):
                conversion.unsure(node, "rank", "it is read as text", f"{_VARIABLES[variable]}()")


def _query(conversion: Conversion, node: cst.CSTNode, helper: str) -> None:
    above = conversion.script.parent(node)
    if helper in ("rank", "local_rank") and isinstance(above, cst.Assign):
        conversion.rank_names |= {path_of(each.target) or "" for each in above.targets}
    conversion.edits.replace(node, conversion.call(helper))
    conversion.done(node, "rank", "right under every launcher, and in one process")


def _variable(conversion: Conversion, node: cst.CSTNode) -> str | None:
    """Return the name of the environment variable that an expression reads, or None."""
    script = conversion.script
    match node:
        case cst.Subscript(value=held, slice=[cst.SubscriptElement(slice=cst.Index(value=key))]) if script.is_a(
            held, "os.environ"
        ):
            value = constant(key)
        case cst.Call(args=[cst.Arg(value=key), *_]) if script.is_a(node, "os.environ.get", "os.getenv"):
            value = constant(key)
        case _:
            return None
    return value if isinstance(value, str) else None


def _is_of_dropped(conversion: Conversion, node: cst.CSTNode) -> bool:
    statement = conversion.script.small_statement_of(node)
    return isinstance(statement, cst.Expr) and conversion.script.is_a(statement.value, *INIT, *_ENDS)


def _drop_group(conversion: Conversion, joins: bool) -> None:
    """Join the group by `setup_process_group`, and remove what leaves it, chooses the device or says where it meets."""
    script, edits = conversion.script, conversion.edits
    gone: list[cst.CSTNode] = []
    for call in list(script.calls(*INIT, *_ENDS)):
        statement = script.small_statement_of(call)
        if not conversion.may_change(call):
            continue
        if not isinstance(statement, cst.Expr) or statement.value is not call:
            conversion.unsure(call, "group", "its value is used", "setup_process_group(), whose value leaves the group")
        elif joins and script.is_a(call, *INIT):
            edits.replace(call, conversion.call("setup_process_group"), drops=True)
            conversion.done(call, "group", "joins the ranks, chooses the device, and leaves at the end")
        else:
            gone.append(statement)
    for assign in script.find(cst.Assign):
        target = assign.targets[0].target
        is_place = isinstance(target, cst.Subscript) and _variable(conversion, target) in _SET
        if is_place and conversion.may_change(assign):
            gone.append(assign)
    for function in conversion.facts.values.functions.values():
        gone += _emptied(conversion, function, gone)
    for each in gone:
        edits.remove(each)
        conversion.done(each, "group", "the launcher says where the ranks meet, and distwrap joins and leaves")


def _emptied(conversion: Conversion, function: Function, gone: list[cst.CSTNode]) -> list[cst.CSTNode]:
    """Return a function with its calls if nothing in it stays; empty if something does, or it is used otherwise."""
    script = conversion.script
    stays = [
        each
        for each in script.nodes(function.body)
        if isinstance(each, cst.BaseSmallStatement) and each not in gone and not isinstance(each, cst.Pass)
    ]
    name = function.name.value
    calls = [script.small_statement_of(node) for node in script.reads(name)]
    plain = all(
        isinstance(each, cst.Expr) and isinstance(each.value, cst.Call) and path_of(each.value.func) == name
        for each in calls
    )
    lost = any(script.inside(each, function) for each in gone)
    return [function, *calls] if lost and plain and not stays and not function.decorators else []


def _convert_collectives(conversion: Conversion) -> None:
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
