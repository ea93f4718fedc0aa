"""A loop with Lightning Fabric's object, by a table of names.

Source: https://lightning.ai/docs/fabric/stable/api/fabric_methods.html
"""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.rules.entry import choose_entry, decorate_entry
from distwrap.convert.rules.files import save_and_load
from distwrap.convert.rules.objects import (
    Special,
    convert_uses,
    first_alone,
    names_of,
    prepare,
    print_once,
    reduction,
    replace_or_drop,
)
from distwrap.convert.script import argument, constant

MADE = ("lightning.fabric.Fabric", "lightning_fabric.Fabric", "lightning.Fabric")


def _setup_optimizers(conversion: Conversion, call: cst.Call) -> bool:
    replace_or_drop(conversion, call, [conversion.script.code(arg.value) for arg in call.args])
    return bool(call.args) and all(arg.keyword is None and not arg.star for arg in call.args)


def _save(conversion: Conversion, call: cst.Call) -> bool:
    """Convert ``fabric.save(path, state)``, whose arguments come the other way round."""
    path, state = argument(call, "path", 0), argument(call, "state", 1)
    if path is None or state is None or len(call.args) != 2:
        return False
    code = conversion.script.code
    conversion.edits.replace(call, conversion.call("save", f"{code(state)}, {code(path)}"))
    return True


CALLS: dict[str, str | Special] = {
    "setup": prepare,
    "setup_module": prepare,
    "setup_dataloaders": prepare,
    "setup_optimizers": _setup_optimizers,
    "backward": first_alone("backward"),
    "print": print_once,
    "all_reduce": reduction("reduce_op", "mean"),
    "barrier": "barrier",
    "broadcast": "broadcast",
    "save": _save,
    "load": first_alone("load"),
    "seed_everything": first_alone("seed_everything"),
    "autocast": "autocast",
    "rank_zero_first": "rank_zero_first",
}
VALUES = {
    "device": "device()",
    "is_global_zero": "is_rank_zero()",
    "global_rank": "rank()",
    "local_rank": "local_rank()",
    "node_rank": "node_rank()",
    "world_size": "world_size()",
}


def is_fabric(conversion: Conversion) -> bool:
    """Return whether a script makes a Fabric."""
    return any(conversion.script.calls(*MADE))


def convert_fabric(conversion: Conversion) -> bool:
    """Convert a script with Fabric; return whether it was done."""
    found = names_of(conversion, MADE)
    if found is None or not all(_options(conversion, call) for call in found[0]):
        return False
    calls, names = found
    needs: list[cst.CSTNode] = [*calls, *(each.loop for each in conversion.facts.training_loops)]
    if not choose_entry(conversion, needs):
        return False
    if not convert_uses(conversion, names, calls=CALLS, values=VALUES, removed=("launch",)):
        return False
    for call in calls:
        conversion.edits.remove(conversion.script.small_statement_of(call))
    save_and_load(conversion)
    return decorate_entry(conversion, needs)


def _options(conversion: Conversion, call: cst.Call) -> bool:
    """Take over the options that the decorator has too."""
    for arg in call.args:
        name = arg.keyword.value if arg.keyword is not None else ""
        value = constant(arg.value)
        if name == "devices" and type(value) is int:
            conversion.options.setdefault("nprocs", str(value))
        elif name in ("strategy", "precision") and isinstance(value, str):
            if value not in ("auto", "32", "32-true"):
                conversion.options.setdefault(name, f'"{value}"')
        elif name == "accelerator" and value not in ("auto", "cuda", "gpu"):
            conversion.left(
                call, "device", "distwrap takes the accelerators that it sees, and the CPU where there is none",
                "hide the devices, as by CUDA_VISIBLE_DEVICES='', to stay on the CPU",
            )  # fmt: skip
        elif not (name == "accelerator" or (name in ("devices", "num_nodes") and value in ("auto", 1))):
            conversion.unsure(call, "object", f"{name or 'an argument'}= has no equal", "the helper for it, by hand")
            return False
    return True
