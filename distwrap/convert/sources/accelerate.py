"""Convert scripts with Accelerate's object, from a table of names.

Source: https://huggingface.co/docs/accelerate/package_reference/accelerator
"""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.names import ACCELERATOR, PREPARES
from distwrap.convert.rules.entry import choose_entry, decorate_entry
from distwrap.convert.rules.files import save_and_load
from distwrap.convert.rules.objects import (
    Special,
    clip_with,
    convert_uses,
    first_alone,
    names_of,
    prepare,
    print_once,
    reduction,
)
from distwrap.convert.script import argument, constant, keyword_of, path_of
from distwrap.convert.sources.accelerate_accumulation import (
    SYNC,
    AccumulationPlan,
    backward,
    is_asked,
    steps_of,
    write_out,
)
from distwrap.convert.sources.accelerate_functions import (
    convert_functions,
    load_state,
    local_first,
    save_state,
    state_dict_of,
)

CALLS: dict[str, str | Special] = {
    "gather": first_alone("gather"),
    "gather_for_metrics": first_alone("gather"),
    "no_sync": first_alone("no_sync"),
    "reduce": reduction("reduction", "sum"),
    "wait_for_everyone": "barrier",
    "unwrap_model": first_alone("unwrap_model"),
    "print": print_once,
    "save": "save",
    "clip_grad_norm_": clip_with("clip_grad_norm_"),
    "main_process_first": "rank_zero_first",
    "autocast": "autocast",
    "clip_grad_value_": clip_with("clip_grad_value_"),
    "get_state_dict": state_dict_of,
    "save_state": save_state,
    "load_state": load_state,
    "local_main_process_first": local_first,
}
VALUES = {
    "device": "device()",
    "is_main_process": "is_rank_zero()",
    "is_local_main_process": "local_rank() == 0",
    "num_processes": "world_size()",
    "process_index": "rank()",
    "local_process_index": "local_rank()",
    "save": "save",
}
REMOVED = ("free_memory", "end_training", "init_trackers")
_TAKEN = ("mixed_precision", "log_with", "project_dir", "cpu", "gradient_accumulation_steps")
# What to write by hand for the most common options.
_BY_HAND = {
    "dataloader_config": 'shard_loader(loader, batch_size="global") for split_batches=True, else its mode= and split=',
    "split_batches": 'shard_loader(loader, batch_size="global")',
    "kwargs_handlers": "wrap_model(model, find_unused_parameters=True), and other options of DDP",
    "fsdp_plugin": 'strategy="fsdp" in the decorator',
    "deepspeed_plugin": 'strategy="deepspeed(stage=2)" in the decorator',
}
_PRECISIONS = {None: None, "no": None, "fp16": "fp16", "bf16": "bf16"}


def is_accelerate(conversion: Conversion) -> bool:
    """Return whether a script creates an Accelerator."""
    return any(conversion.script.calls(*ACCELERATOR))


def convert_accelerate(conversion: Conversion) -> bool:
    """Convert a script with Accelerate; return whether this succeeded."""
    found = names_of(conversion, ACCELERATOR)
    if found is None:
        return False
    calls, names = found
    needed: list[cst.CSTNode] = [*calls, *(each.loop for each in conversion.facts.training_loops)]
    accumulations = [_options(conversion, call, needed) for call in calls]
    accumulation = accumulations[0]
    if accumulation is None or len(calls) > 1:
        return False
    if conversion.reach.entry is None and not choose_entry(conversion, needed):
        return False
    return _convert(conversion, calls, names, accumulation) and decorate_entry(conversion, needed)


def _convert(conversion: Conversion, calls: list[cst.Call], names: set[str], accumulation: AccumulationPlan) -> bool:
    script = conversion.script
    for call, attribute in [each for name in PREPARES for each in script.method_calls(name)]:
        if path_of(attribute.value) in names and not prepare(conversion, call):
            conversion.unsure(
                call, "object", "it is not known of what kind its arguments are", "wrap_model, shard_loader"
            )
            return False
    if not write_out(conversion, accumulation, names):
        return False
    table: dict[str, str | Special] = {**CALLS, "backward": lambda each, call: backward(each, accumulation, call)}
    if accumulation.may_scale:
        table["clip_grad_norm_"] = lambda each, call: _clip_unscaled(each, accumulation, call, "clip_grad_norm_")
        table["clip_grad_value_"] = lambda each, call: _clip_unscaled(each, accumulation, call, "clip_grad_value_")
    words = (SYNC, "accumulate", *PREPARES)
    if not convert_uses(conversion, names, calls=table, values=VALUES, removed=REMOVED, words=words):
        return False
    for call in calls:
        conversion.edits.remove(script.small_statement_of(call))
    convert_functions(conversion)
    save_and_load(conversion)
    return True


def _clip_unscaled(conversion: Conversion, accumulation: AccumulationPlan, call: cst.Call, name: str) -> bool:
    """Convert a clip of gradients that may be scaled, if it is clear to which optimizer they belong."""
    script = conversion.script
    statement, function = script.small_statement_of(call), script.function_of(call)
    paths = {each.path for each in conversion.prepared if each.kind == "optimizer" and each.function is function}
    is_plain = isinstance(statement, cst.Expr) and statement.value is call and "torch" in script.bound_names
    is_partial = bool(accumulation.windows) and not is_asked(
        conversion, call
    )  # later scaled gradients would be added to unscaled ones
    if len(paths) != 1 or not is_plain or is_partial:
        return False
    unscaled = conversion.call("unscale", paths.pop())
    conversion.edits.replace(call.func, f"{unscaled}; torch.nn.utils.{name}")
    return True


def _options(conversion: Conversion, call: cst.Call, needed: list[cst.CSTNode]) -> AccumulationPlan | None:
    """Move options of the object to the decorator; return None if an option cannot be converted."""
    precision = argument(call, "mixed_precision")
    name = constant(precision) if precision is not None else None
    if name in _PRECISIONS:
        if _PRECISIONS[name] is not None:
            conversion.decorator_options["precision"] = f'"{name}"'
    elif precision is None or not _precision_of_call(conversion, call, precision, needed):
        conversion.unsure(call, "precision", "it is not written here", "precision= in the decorator")
        return None
    for arg in call.args:
        keyword = keyword_of(arg)
        is_default = keyword == "step_scheduler_with_optimizer" and constant(arg.value) is True
        if keyword not in _TAKEN and not is_default:
            fix = _BY_HAND.get(keyword or "", "the helper for it, by hand")
            conversion.unsure(call, "object", f"{keyword or 'an argument'}= is not converted", fix)
            return None
    every = steps_of(conversion, argument(call, "gradient_accumulation_steps"))
    if every is None:
        conversion.unsure(call, "accumulate", "its number of batches is not plain", "a name for the number")
        return None
    return AccumulationPlan(every, conversion.script.function_of(call), name in ("fp16", ...))


def _precision_of_call(
    conversion: Conversion, call: cst.Call, precision: cst.BaseExpression, needed: list[cst.CSTNode]
) -> bool:
    """Let the caller of the training function set the precision, if it is an argument of the function."""
    script, values = conversion.script, conversion.facts.values
    function = script.function_of(call)
    path = path_of(precision)
    if (
        function is None
        or path is None
        or script.class_of(call) is not None
        or function not in values.functions.values()
    ):
        return False
    name, dot, rest = path.partition(".")
    position, calls = values.parameter(function, name), values.callers(function)
    given = [argument(each, name, position) for each in calls]
    is_plain = all(each is not None and path_of(each) is not None for each in given) and calls
    if position is None or values.bindings.get((function, name)) or not is_plain:
        return False
    if not all(conversion.facts.holds(function, each) for each in needed):
        return False
    conversion.reach.begin_at(function)
    for each, value in zip(calls, given, strict=True):
        text = f'{path_of(value)}{dot}{rest} or "no"'
        conversion.edits.insert(script.span(each.func)[1], f".options(precision={text})")
    conversion.done(call, "precision", "the call says it, since the ranks start with it")
    return True
