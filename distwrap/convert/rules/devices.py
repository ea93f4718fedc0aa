"""Drop the numbers of devices: without one, a device is the rank's own."""

from __future__ import annotations

import re

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.names import ACCELERATORS, DEVICE
from distwrap.convert.script import constant, keyword_of, path_of

_NUMBERED = re.compile(rf"^[fF]?(['\"])({'|'.join(ACCELERATORS)}):(\d+|\{{[^{{}}]*\}})\1$")


def use_own_device(conversion: Conversion) -> None:
    """Write ``"cuda"`` for ``"cuda:0"`` and ``f"cuda:{rank}"``, and `device` where a number alone is a device."""
    script = conversion.script
    for kind in (cst.SimpleString, cst.FormattedString):
        for node in list(script.find(kind)):
            found = _NUMBERED.match(script.code(node))
            if found is not None and conversion.may_change(node):
                conversion.edits.replace(node, f"{found[1]}{found[2]}{found[1]}", drops=True)
                conversion.done(node, "device", "without a number it is each rank's own")
    for call in list(script.calls(DEVICE)):
        if call.args and _is_number(conversion, call.args[-1].value) and conversion.may_change(call):
            conversion.edits.replace(call, conversion.call("device"), drops=True)
            conversion.done(call, "device", "is the rank's own device")
    for method in ("to", "cuda"):
        for call, attribute in list(script.method_calls(method)):
            given = call.args[0] if call.args else None
            if given is None or keyword_of(given) not in ("", "device") or script.names(call.func):
                continue
            if _is_number(conversion, given.value) and conversion.may_change(call):
                conversion.edits.replace(given.value, conversion.call("device"), drops=True)
                conversion.edits.replace(attribute.attr, "to")
                conversion.done(call, "device", "goes to the rank's own device, which may be the CPU")


def _is_number(conversion: Conversion, node: cst.BaseExpression) -> bool:
    """Return whether an expression is a literal number or holds a rank, also in a choice between it and the CPU."""
    if isinstance(node, cst.IfExp):
        return _is_number(conversion, node.body) and constant(node.orelse) in ("cpu", None)
    return type(constant(node)) is int or path_of(node) in conversion.rank_names
