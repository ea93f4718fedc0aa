"""A loop with Accelerate's object, by a table of names.

Source: https://huggingface.co/docs/accelerate/package_reference/accelerator
"""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.rules.entry import choose_entry, decorate_entry
from distwrap.convert.rules.files import save_and_load
from distwrap.convert.rules.objects import (
    Special,
    clip,
    convert_uses,
    first_alone,
    names_of,
    prepare,
    print_once,
    reduction,
)
from distwrap.convert.script import argument, constant

MADE = ("accelerate.Accelerator", "accelerate.accelerator.Accelerator")
CALLS: dict[str, str | Special] = {
    "prepare": prepare,
    "backward": first_alone("backward"),
    "gather": first_alone("gather"),
    "gather_for_metrics": first_alone("gather"),
    "reduce": reduction("reduction", "sum"),
    "wait_for_everyone": "barrier",
    "unwrap_model": first_alone("unwrap_model"),
    "print": print_once,
    "save": "save",
    "clip_grad_norm_": clip,
    "main_process_first": "rank_zero_first",
    "autocast": "autocast",
}
VALUES = {
    "device": "device()",
    "is_main_process": "is_rank_zero()",
    "is_local_main_process": "local_rank() == 0",
    "num_processes": "world_size()",
    "process_index": "rank()",
    "local_process_index": "local_rank()",
}
REMOVED = ("free_memory", "end_training", "init_trackers")
_PRECISIONS = {"no": None, "fp16": "fp16", "bf16": "bf16"}


def is_accelerate(conversion: Conversion) -> bool:
    """Return whether a script makes an Accelerator."""
    return any(conversion.script.calls(*MADE))


def convert_accelerate(conversion: Conversion) -> bool:
    """Convert a script with Accelerate; return whether it was done."""
    found = names_of(conversion, MADE)
    if found is None:
        return False
    calls, names = found
    for call in calls:
        if not _options(conversion, call):
            return False
    needs: list[cst.CSTNode] = [*calls, *(each.loop for each in conversion.facts.training_loops)]
    return choose_entry(conversion, needs) and _convert(conversion, calls, names) and decorate_entry(conversion, needs)


def _convert(conversion: Conversion, calls: list[cst.Call], names: set[str]) -> bool:
    if not convert_uses(conversion, names, calls=CALLS, values=VALUES, removed=REMOVED):
        return False
    for call in calls:
        conversion.edits.remove(conversion.script.small_statement_of(call))
    save_and_load(conversion)
    return True


def _options(conversion: Conversion, call: cst.Call) -> bool:
    """Take over the options of the object that a decorator has too; others, where they matter, are refused."""
    precision = argument(call, "mixed_precision")
    if precision is not None:
        name = constant(precision)
        if name not in _PRECISIONS:
            conversion.unsure(call, "precision", "it is not written here", "precision= in the decorator")
            return False
        if _PRECISIONS[name] is not None:
            conversion.options["precision"] = f'"{name}"'
    for arg in call.args:
        name = arg.keyword.value if arg.keyword is not None else ""
        if name not in ("mixed_precision", "log_with", "project_dir", "cpu"):
            conversion.unsure(call, "object", f"{name or 'an argument'}= has no equal", "the helper for it, by hand")
            return False
    return True
