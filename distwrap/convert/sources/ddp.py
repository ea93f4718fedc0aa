"""Convert scripts that use torch's DistributedDataParallel directly and that torchrun starts."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.names import INIT, PROCESSES, WRAPPER
from distwrap.convert.rules.collectives import convert_collectives
from distwrap.convert.rules.devices import use_own_device
from distwrap.convert.rules.entry import choose_entry, decorate_entry
from distwrap.convert.rules.files import save_and_load
from distwrap.convert.rules.samplers import shard_instead_of_sampling
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
_SET = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG")


def is_ddp(conversion: Conversion) -> bool:
    """Return whether a script itself joins a process group or wraps models for one."""
    return any(conversion.script.calls(*WRAPPER, *INIT))


def convert_ddp(conversion: Conversion) -> bool:
    """Convert a script that torchrun starts; return whether this succeeded."""
    script = conversion.script
    needed: list[cst.CSTNode] = [*script.calls(*WRAPPER, *INIT, *_RANKS), *conversion.facts.optimizer_calls()]
    needed += [each.loop for each in conversion.facts.training_loops]
    for call in script.calls(*WRAPPER):
        if _is_conditional(conversion, call):
            conversion.unsure(
                call, "wrap_model", "under this condition some runs do not wrap the model, and a rank whose "
                "model is not wrapped trains alone", "one path for all: wrap_model, a no-op in one process",
            )  # fmt: skip
            return False
    for call in script.calls(*PROCESSES):
        conversion.unsure(
            call, "entry", "the script starts its ranks by itself, and each of them would start ranks again",
            "@distributed(nprocs=...) on the function that they run, and a plain call of it",
        )  # fmt: skip
        return False
    needed = [each for each in needed if not _is_of_helper(conversion, each)] or needed
    return choose_entry(conversion, needed) and convert_body(conversion) and decorate_entry(conversion, needed)


def _is_conditional(conversion: Conversion, call: cst.Call) -> bool:
    """Return whether a model is wrapped only under a condition."""
    script = conversion.script
    for each in script.ancestors(call):
        if isinstance(each, (cst.FunctionDef, cst.ClassDef)):
            return False
        if isinstance(each, cst.IfExp):
            return True
        if isinstance(each, cst.If):
            branches: list[cst.CSTNode] = [each.body, *([each.orelse] if each.orelse is not None else [])]
            if len(branches) < 2 or not all(any(script.calls(*WRAPPER, within=branch)) for branch in branches):
                return True
    return False


def _is_of_helper(conversion: Conversion, node: cst.CSTNode) -> bool:
    """Return whether a piece of code is in a function that neither wraps a model nor trains."""
    function = conversion.script.function_of(node)
    return function is not None and not any(
        conversion.script.inside(each, function)
        for each in (*conversion.script.calls(*WRAPPER), *(one.loop for one in conversion.facts.training_loops))
    )


def convert_body(conversion: Conversion) -> bool:
    """Convert everything except how the script starts."""
    _wrap(conversion)
    use_the_model_itself(conversion, WRAPPER)
    shard_instead_of_sampling(conversion)
    _ask_for_rank(conversion)
    convert_collectives(conversion)
    for assign in conversion.script.find(cst.Assign):
        if path_of(assign.value) in conversion.rank_names:  # args.gpu = gpu
            conversion.rank_names |= {path_of(each.target) or "" for each in assign.targets}
    use_own_device(conversion)
    _drop_group(conversion)
    save_and_load(conversion)
    _no_sync(conversion)
    return True


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
        keep_options(conversion, call, _DROPPED)
        conversion.rename_call(call, "wrap_model")
        conversion.wrapped_expressions.add(call)
        conversion.done(
            call, "wrap_model", "a wrapped model is DistributedDataParallel, and answers like the model itself"
        )


def keep_options(conversion: Conversion, call: cst.Call, dropped: tuple[str, ...]) -> None:
    """Remove a wrapper's arguments for devices and process group; keep the others."""
    script = conversion.script
    kept = [call.args[0], *(arg for arg in call.args[1:] if keyword_of(arg) not in ("", *dropped))]
    if len(kept) < len(call.args):
        start, end = script.span(call.args[0])[0], script.span(call.args[-1].value)[1]
        conversion.edits.replace_span(start, end, script.listed(kept))
        close = script.data[end : script.span(call)[1]]
        if close.lstrip().startswith(b",") and b"\n" not in close:
            conversion.edits.replace_span(end, end + close.index(b",") + 1, "")


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


def _drop_group(conversion: Conversion) -> None:
    """Remove calls that join or leave the group or choose the device, and functions that become empty."""
    script, edits = conversion.script, conversion.edits
    gone: list[cst.CSTNode] = []
    for call in list(script.calls(*INIT, *_ENDS)):
        statement = script.small_statement_of(call)
        if isinstance(statement, cst.Expr) and statement.value is call and conversion.may_change(call):
            if not _tell_ranks(conversion, call, statement, gone):
                edits.remove(statement)
                gone.append(statement)
            conversion.done(call, "group", "the decorator joins the ranks, chooses the device, and leaves")
        elif conversion.may_change(call):
            conversion.unsure(call, "group", "its value is used", "the decorator does it")
    for assign in list(script.find(cst.Assign)):
        target = assign.targets[0].target
        variable = _variable(conversion, target) if isinstance(target, cst.Subscript) else None
        if variable in _SET[:5] and len(assign.targets) == 1 and conversion.may_change(assign):
            edits.remove(assign)
            gone.append(assign)
            conversion.done(assign, "group", "the launcher says where the ranks meet")
    for function in list(conversion.facts.values.functions.values()):
        if _is_empty(conversion, function, gone):
            _drop_function(conversion, function)


def _tell_ranks(conversion: Conversion, call: cst.Call, statement: cst.Expr, gone: list[cst.CSTNode]) -> bool:
    """Assign the true rank and number of ranks to attributes that the group was made with, if read elsewhere."""
    script, lines = conversion.script, []
    if not script.is_a(call, *INIT):
        return False
    for keyword, helper in (("rank", "rank"), ("world_size", "world_size")):
        path = path_of(argument(call, keyword))
        if path is None or "." not in path:
            continue
        before = [
            each
            for each in script.find(cst.Assign, script.function_of(call))
            if [path_of(one.target) for one in each.targets] == [path] and script.span(each)[0] < script.span(call)[0]
        ]
        reads = [
            node for node in script.reads(path) if not any(script.inside(node, each) for each in (statement, *before))
        ]
        for each in before:
            conversion.edits.remove(each)
        gone += before
        if reads:
            lines.append(f"{path} = {conversion.call(helper)}")
            conversion.rank_names |= {path} if helper == "rank" else set()
    if not lines:
        return False
    conversion.edits.replace(statement, lines[0])
    for line in lines[1:]:
        conversion.edits.line_after(statement, line)
    return True


def _is_empty(conversion: Conversion, function: Function, gone: list[cst.CSTNode]) -> bool:
    """Return whether a function that lost statements contains nothing but a docstring any more."""
    script = conversion.script
    lost = [each for each in gone if script.function_of(each) is function]
    rest = [
        small
        for line in function.body.body
        for small in (line.body if isinstance(line, cst.SimpleStatementLine) else [line])
        if small not in gone
        and not (isinstance(small, cst.Expr) and isinstance(small.value, cst.SimpleString))
        and not isinstance(small, cst.Pass)
    ]
    comparison = [each for each in rest if not (isinstance(each, cst.If) and _is_if_of(each, gone))]
    return bool(lost) and not comparison


def _is_if_of(branch: cst.If, gone: list[cst.CSTNode]) -> bool:
    """Return whether all statements of a branch are removed."""
    small = [
        each
        for line in branch.body.body
        for each in (line.body if isinstance(line, cst.SimpleStatementLine) else [line])
    ]
    return branch.orelse is None and all(each in gone for each in small)


def _drop_function(conversion: Conversion, function: Function) -> None:
    script, name = conversion.script, function.name.value
    statements = [script.small_statement_of(node) for node in script.reads(name)]
    if function.decorators or not all(
        isinstance(each, cst.Expr) and isinstance(each.value, cst.Call) and path_of(each.value.func) == name
        for each in statements
    ):
        return
    for each in (function, *statements):
        conversion.edits.remove(each)
    conversion.done(function, "group", f"nothing is left of {name}(), so it goes, with its calls")
