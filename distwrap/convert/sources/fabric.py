"""Convert scripts with Lightning Fabric's object, from a table of names.

Source: https://lightning.ai/docs/fabric/stable/api/fabric_methods.html
"""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.names import FABRIC, FABRIC_SEEDS
from distwrap.convert.rules.entry import choose_entry, decorate_entry
from distwrap.convert.rules.files import save_and_load
from distwrap.convert.rules.objects import (
    Special,
    convert_uses,
    first_alone,
    may_clip,
    names_of,
    prepare,
    print_once,
    reduction,
    replace_or_drop,
)
from distwrap.convert.script import argument, constant, keyword_of, keywords_of, path_of


def _setup_optimizers(conversion: Conversion, call: cst.Call) -> bool:
    replace_or_drop(conversion, call, [conversion.script.code(arg.value) for arg in call.args])
    return bool(call.args) and all(arg.keyword is None and not arg.star for arg in call.args)


def _save(conversion: Conversion, call: cst.Call) -> bool:
    """Convert ``fabric.save(path, state)``, whose arguments have the other order."""
    path, state = argument(call, "path", 0), argument(call, "state", 1)
    if path is None or state is None or len(call.args) != 2:
        return False
    code = conversion.script.code
    conversion.edits.replace(call, conversion.call("save", f"{code(state)}, {code(path)}"))
    return True


def _load(conversion: Conversion, call: cst.Call) -> bool:
    """Convert ``fabric.load(path, state)``, which updates the state, and ``fabric.load(path)``."""
    path, state, strict = argument(call, "path", 0), argument(call, "state", 1), argument(call, "strict", 2)
    if path is None or len(call.args) != 1 + (state is not None) + (strict is not None):
        return False
    code = conversion.script.code
    into = "" if state is None else f", into={code(state)}"
    more = "" if strict is None else f", strict={code(strict)}"
    text = conversion.call("load", f"{code(path)}{into}{more}")
    statement, edits = conversion.script.small_statement_of(call), conversion.edits
    name = path_of(state)
    if state is None or (isinstance(state, cst.Dict) and isinstance(statement, cst.Expr)):
        edits.replace(call, text)
        return True
    target = path_of(statement.targets[0].target) if isinstance(statement, cst.Assign) else "loaded"
    is_plain = isinstance(statement, (cst.Assign, cst.Expr)) and statement.value is call
    if name is None or target is None or not is_plain or not edits.has_line_of_its_own(statement):
        return False
    edits.replace(statement, f"{target} = {text}")
    values = f'{{key: {target}[key] for key in {name} if not hasattr({name}[key], "load_state_dict")}}'
    edits.line_after(statement, f"{name}.update({values})")
    if isinstance(statement, cst.Assign):  # Fabric returns only the rest
        edits.line_after(statement, f"{target} = {{key: {target}[key] for key in {target} if key not in {name}}}")
    return True


def _clip(conversion: Conversion, call: cst.Call) -> bool:
    """Convert ``fabric.clip_gradients(model, optimizer, ...)`` if gradients are not scaled."""
    model = path_of(argument(call, "module", 0))
    norm, value = argument(call, "max_norm", 3), argument(call, "clip_val", 2)
    others = keywords_of(call.args)
    known = {"module", "optimizer", "max_norm", "clip_val", "norm_type", "error_if_nonfinite"}
    if not may_clip(conversion) or model is None or (norm is None) == (value is None) or not others <= known:
        return False
    code = conversion.script.code
    texts = [f"{model}.parameters()", code(norm or value)]  # type: ignore[arg-type]
    texts += [
        f"{keyword_of(arg)}={code(arg.value)}"
        for arg in call.args
        if keyword_of(arg) in ("norm_type", "error_if_nonfinite")
    ]
    if norm is not None and "error_if_nonfinite" not in others:
        texts.append("error_if_nonfinite=True")  # Fabric's default
    name = "clip_grad_norm_" if norm is not None else "clip_grad_value_"
    conversion.edits.replace(call, f"torch.nn.utils.{name}({', '.join(texts)})")
    return True


def _all_gather(conversion: Conversion, call: cst.Call) -> bool:
    """Convert ``fabric.all_gather(x)`` if it does not matter that Fabric stacks the ranks' tensors."""
    above = conversion.script.parent(call)
    holder = conversion.script.parent(above) if isinstance(above, cst.Attribute) else None
    is_shapeless = (
        isinstance(above, cst.Attribute)
        and above.attr.value in ("mean", "sum", "max", "min", "flatten")
        and isinstance(holder, cst.Call)
        and not holder.args
    )
    return is_shapeless and first_alone("gather")(conversion, call)


def _no_sync(conversion: Conversion, call: cst.Call) -> bool:
    """Convert ``with fabric.no_backward_sync(model, enabled=...)``."""
    model, enabled = argument(call, "module", 0), argument(call, "enabled", 1)
    if model is None or len(call.args) != 1 + (enabled is not None):
        return False
    code = conversion.script.code
    more = "" if enabled is None else f", enabled={code(enabled)}"
    conversion.edits.replace(call, conversion.call("no_sync", code(model) + more))
    return True


def _rank_zero_first(conversion: Conversion, call: cst.Call) -> bool:
    """Convert ``with fabric.rank_zero_first()``; ``local=`` means the first rank of each node."""
    if any(arg.keyword is None and index > 0 for index, arg in enumerate(call.args)) or len(call.args) > 1:
        return False
    local = argument(call, "local", 0)
    text = "" if local is None or constant(local) is False else f"local={conversion.script.code(local)}"
    conversion.edits.replace(call, conversion.call("rank_zero_first", text))
    return True


def _seeds(conversion: Conversion) -> None:
    """Convert calls of the function ``seed_everything``."""
    for full in FABRIC_SEEDS:
        for call in list(conversion.script.calls(full)):
            if len(call.args) == 1 and keyword_of(call.args[0]) in ("", "seed"):
                conversion.helpers.replace_import(conversion.edits, full)
                conversion.edits.replace(
                    call, conversion.call("seed_everything", conversion.script.code(call.args[0].value))
                )
                conversion.done(call, "seed", "seeds Python, numpy and torch, and loaders' workers by itself")


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
    "load": _load,
    "load_raw": first_alone("load"),
    "clip_gradients": _clip,
    "no_backward_sync": _no_sync,
    "to_device": first_alone("to_device"),
    "all_gather": _all_gather,
    "seed_everything": first_alone("seed_everything"),
    "autocast": "autocast",
    "rank_zero_first": _rank_zero_first,
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
    """Return whether a script creates a Fabric."""
    return any(conversion.script.calls(*FABRIC))


def convert_fabric(conversion: Conversion) -> bool:
    """Convert a script with Fabric; return whether this succeeded."""
    found = names_of(conversion, FABRIC)
    if found is None or not all(_options(conversion, call) for call in found[0]):
        return False
    calls, names = found
    needed: list[cst.CSTNode] = [*calls, *(each.loop for each in conversion.facts.training_loops)]
    if not choose_entry(conversion, needed):
        return False
    if not convert_uses(conversion, names, calls=CALLS, values=VALUES, removed=("launch",)):
        return False
    for call in calls:
        conversion.edits.remove(conversion.script.small_statement_of(call))
    _seeds(conversion)
    save_and_load(conversion)
    return decorate_entry(conversion, needed)


def _options(conversion: Conversion, call: cst.Call) -> bool:
    """Move options of the object to the decorator; return whether all of them are known."""
    for arg in call.args:
        name = keyword_of(arg)
        value = constant(arg.value)
        if name == "devices" and type(value) is int:
            conversion.decorator_options.setdefault("nprocs", str(value))
        elif name in ("strategy", "precision") and isinstance(value, str):
            if value not in ("auto", "32", "32-true"):
                conversion.decorator_options.setdefault(name, f'"{value}"')
        elif name == "accelerator" and value not in ("auto", "cuda", "gpu"):
            conversion.left(
                call, "device", "distwrap takes the accelerators that it sees, and the CPU where there is none",
                "hide the devices, as by CUDA_VISIBLE_DEVICES='', to stay on the CPU",
            )  # fmt: skip
        elif not (name == "accelerator" or (name in ("devices", "num_nodes") and value in ("auto", 1))):
            conversion.unsure(call, "object", f"{name or 'an argument'}= has no equal", "the helper for it, by hand")
            return False
    return True
