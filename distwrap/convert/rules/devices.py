"""Replace a script's devices by the device of the rank."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.names import ACCELERATORS, DEVICE
from distwrap.convert.script import argument, constant, keyword_of, path_of


def use_own_device(conversion: Conversion) -> None:
    """Replace devices by the rank's own; a device that is always the CPU stays."""
    _drop_first_numbers(conversion)
    _replace_devices(conversion)
    _replace_choices(conversion)
    _replace_cuda_calls(conversion)
    _replace_in_to(conversion)


def _drop_first_numbers(conversion: Conversion) -> None:
    """Replace ``"cuda:0"`` by ``"cuda"`` in code that runs before there are ranks."""
    script = conversion.script
    for node in list(script.find(cst.SimpleString)):
        if not conversion.on_ranks(node) and conversion.may_change(node) and _is_first_device(constant(node)):
            conversion.edits.replace(node, script.code(node).replace(":0", ""))
            conversion.done(
                node, "device", "without a number it is each rank's own; this is read before there are ranks"
            )


def _replace_devices(conversion: Conversion) -> None:
    script = conversion.script
    for call in list(script.calls(DEVICE)):
        if (
            conversion.may_change(call)
            and conversion.on_ranks(call)
            and _is_accelerator(conversion, call)
            and not _is_within(conversion, call)
        ):
            _replace(conversion, _outermost(conversion, call))


def _replace_choices(conversion: Conversion) -> None:
    """Replace ``"cuda" if torch.cuda.is_available() else "cpu"`` if it is only used to place tensors."""
    script = conversion.script
    for choice in list(script.find(cst.IfExp)):
        above = script.parent(choice)
        if constant(choice.orelse) == "cpu" and not (
            isinstance(above, cst.Arg) and script.is_a(script.parent(above), DEVICE)
        ):
            if isinstance(above, cst.IfExp) or not conversion.may_change(choice) or not conversion.on_ranks(choice):
                continue
            if _only_places(conversion, choice):
                _replace(conversion, choice)
            elif _is_each_ranks(conversion, choice):
                conversion.left(choice, "device", "without a number it is each rank's own device already")
            else:
                conversion.unsure(
                    choice, "device", "it is used as text too", "device(), and device().type where text is wanted"
                )


def _replace_cuda_calls(conversion: Conversion) -> None:
    script = conversion.script
    for call, attribute in list(script.method_calls("cuda")):
        if (
            not conversion.may_change(call)
            or not isinstance(attribute.value, cst.BaseExpression)
            or script.names(call.func)
        ):
            continue
        start = script.span(attribute.value)[1]
        conversion.edits.replace_span(start, script.span(call)[1], f".to({_arguments(conversion, call)})")
        conversion.done(call, "device", "goes to the rank's own device, which may be the CPU")


def _replace_in_to(conversion: Conversion) -> None:
    """Replace ``.to("cuda")``, ``.to(0)`` and ``.to(rank)`` by ``.to(device())``."""
    script = conversion.script
    for call, _ in list(script.method_calls("to")):
        first = call.args[0] if call.args else None
        name = constant(first.value) if first is not None else ...
        if (
            first is not None
            and conversion.may_change(call)
            and (
                type(name) is int
                or (isinstance(name, str) and name.split(":")[0] in ACCELERATORS)
                or path_of(first.value) in conversion.rank_names
            )
        ):
            conversion.edits.replace(first.value, conversion.call("device"))
            conversion.done(call, "device", "goes to the rank's own device, which may be the CPU")


def _is_each_ranks(conversion: Conversion, choice: cst.IfExp) -> bool:
    """Return whether a choice is between the CPU and a device name without a number."""
    words = [constant(each) for each in conversion.script.find(cst.SimpleString, choice.body)]
    words += [constant(choice.orelse)]
    return isinstance(choice.body, cst.SimpleString) and all(each in (*ACCELERATORS, "cpu") for each in words)


def _is_first_device(value: object) -> bool:
    return isinstance(value, str) and value in {f"{name}:0" for name in ACCELERATORS}


def _arguments(conversion: Conversion, call: cst.Call) -> str:
    kept = [conversion.script.code(arg) for arg in call.args if keyword_of(arg) not in ("", "device")]
    return ", ".join([conversion.call("device"), *kept])


def _replace(conversion: Conversion, node: cst.CSTNode) -> None:
    conversion.edits.replace(node, conversion.call("device"))
    conversion.done(node, "device", "is the rank's own device")


def _is_accelerator(conversion: Conversion, call: cst.Call) -> bool:
    """Return whether a ``torch.device(...)`` is or may be an accelerator."""
    first = argument(call, "type", 0)
    if first is None:
        first = argument(call, "device", 0)
    return first is not None and _names_accelerator(conversion, first)


def _names_accelerator(conversion: Conversion, node: cst.BaseExpression) -> bool:
    if isinstance(node, cst.IfExp):
        return _names_accelerator(conversion, node.body) or _names_accelerator(conversion, node.orelse)
    if isinstance(node, cst.FormattedString):
        return conversion.script.code(node).lstrip("fF\"'").startswith(ACCELERATORS)
    value = constant(node)
    if value is ...:
        return "accelerator" in (path_of(getattr(node, "value", None)) or conversion.script.code(node))
    return type(value) is int or (isinstance(value, str) and value.split(":")[0] in ACCELERATORS)


def _outermost(conversion: Conversion, call: cst.Call) -> cst.CSTNode:
    """Return the conditional expression around a device, or the device itself."""
    node: cst.CSTNode = call
    while isinstance(conversion.script.parent(node), cst.IfExp):
        node = conversion.script.parent(node) or node
    return node


def _is_within(conversion: Conversion, call: cst.Call) -> bool:
    """Return whether a device is replaced with an earlier one of the same conditional expression."""
    above = conversion.script.parent(call)
    if not isinstance(above, cst.IfExp):
        return False
    outermost = _outermost(conversion, call)
    first = next(
        each for each in conversion.script.calls(DEVICE, within=outermost) if _is_accelerator(conversion, each)
    )
    return first is not call


def _only_places(conversion: Conversion, choice: cst.IfExp) -> bool:
    """Return whether a device's name is only used to place tensors."""
    script, values = conversion.script, conversion.facts.values
    if not _names_accelerator(conversion, choice):
        return False
    statement = script.parent(choice)
    if isinstance(statement, cst.Arg):
        call = script.parent(statement)
        return isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute) and call.func.attr.value == "to"
    paths = {path_of(each.target) for found in values.bindings.values() for each in found if each.value is choice}
    if len(paths) != 1 or None in paths:
        return False
    for node in script.reads(paths.pop()):
        above = script.parent(node)
        if isinstance(above, (cst.FormattedStringExpression, cst.Param)):
            continue
        call = script.parent(above) if isinstance(above, cst.Arg) else None
        if not isinstance(call, cst.Call) or not isinstance(above, cst.Arg):
            return False
        keyword = keyword_of(above)
        places = isinstance(call.func, cst.Attribute) and call.func.attr.value == "to"
        handed = path_of(call.func) in values.functions or path_of(call.func) in values.classes
        if not (
            places or handed or keyword in ("device", "map_location") or script.is_a(call, "builtins.print", DEVICE)
        ):
            return False
    return True
