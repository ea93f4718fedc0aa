"""Convert mixed precision: torch's autocast and scaler become the decorator's `precision` and two helpers."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.names import AUTOCAST, CLIP, SCALER
from distwrap.convert.script import argument, argument_node, constant, path_of


def use_precision(conversion: Conversion) -> None:
    """Convert mixed precision if all of it is clear; otherwise keep torch's own, which works under distwrap too."""
    script = conversion.script
    contexts, scalers = list(script.calls(*AUTOCAST)), list(script.calls(*SCALER))
    if not contexts or not all(conversion.may_change(each) for each in [*contexts, *scalers]):
        return
    kinds = {_precision_of(conversion, each) for each in contexts}
    conditions = {_condition(conversion, each) for each in [*contexts, *scalers]}
    uses = _uses(conversion, scalers)
    precision = kinds.pop() if len(kinds) == 1 else None
    outside = _outside(conversion, contexts)
    is_clear = precision is not None and len(conditions) == 1 and None not in conditions and uses is not None
    if not is_clear or uses is None or len(scalers) > 1 or outside is not None:
        conversion.left(
            contexts[0] if outside is None else outside, "precision", "torch's autocast and scaler work as they are"
            + ("" if outside is None else ", and the model is called outside of autocast here"),
            'precision= in the decorator, autocast(), backward(loss) and optimizer_step(optimizer)',
        )  # fmt: skip
        return
    condition = conditions.pop()
    conversion.decorator_options["precision"] = f'"{precision}"' + (f' if {condition} else "32"' if condition else "")
    for each in contexts:
        conversion.edits.replace(each, conversion.call("autocast"))
        conversion.done(each, "precision", f"the forward of wrapped models is in {precision}; so is what is in here")
    _use_helpers(conversion, uses)
    for scaler in scalers:
        conversion.edits.remove(script.small_statement_of(scaler))
        conversion.done(scaler, "precision", "the run has a scaler of its own where its precision needs one")


def _outside(conversion: Conversion, contexts: list[cst.Call]) -> cst.Call | None:
    """Return a call of a wrapped model outside of autocast, which `precision=` would change, or None."""
    script, values = conversion.script, conversion.facts.values
    for call in script.find(cst.Call):
        path, node, blocks = path_of(call.func), call, [call]
        if path not in conversion.wrapped and not any(
            each in conversion.wrapped_expressions for each in (values.sources(call.func) if path else ())
        ):
            continue
        function = script.function_of(node)
        if function is not None:
            blocks += values.callers(function)  # the function may be called within autocast
        held = [
            any(
                script.inside(context, item.item)
                for context in contexts
                for above in script.ancestors(each)
                if isinstance(above, cst.With)
                for item in above.items
            )
            for each in blocks
        ]
        if not held[0] and not (len(held) > 1 and all(held[1:])):
            return call
    return None


def _precision_of(conversion: Conversion, call: cst.Call) -> str | None:
    dtype = argument(call, "dtype", 1)
    name = "" if dtype is None else next(iter(conversion.script.names(dtype)), "?")
    device = constant(argument(call, "device_type", 0))
    if dtype is None and (device == "cuda" or conversion.script.is_a(call, "torch.cuda.amp.autocast")):
        return "fp16"
    return {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.half": "fp16"}.get(name)


def _condition(conversion: Conversion, call: cst.Call) -> str | None:
    """Return the condition that enables a context or scaler: "" for always, or a test for a GPU; None if unclear."""
    enabled = argument(call, "enabled")
    if enabled is None or constant(enabled) is True:
        return ""
    script = conversion.script
    sources = list(conversion.facts.values.sources(enabled))
    if all(each is not None and script.is_a(each, "torch.cuda.is_available") for each in sources):
        return f"{script.code(sources[0])}" if sources and sources[0] is not None else None
    return None


def _uses(conversion: Conversion, scalers: list[cst.Call]) -> list[cst.Call] | None:
    """Return the calls of a scaler's methods, or None if a use is not clear."""
    script = conversion.script
    found: list[cst.Call] = []
    for scaler in scalers:
        statement = script.assignment_of(scaler)
        if statement is None:
            return None
        path = path_of(statement.targets[0].target)
        for node in script.reads(path):
            above = script.parent(node)
            if isinstance(above, cst.Param):
                continue
            call = script.parent(above) if isinstance(above, cst.Attribute) else None
            if not isinstance(above, cst.Attribute) or not isinstance(call, cst.Call) or call.func is not above:
                return None
            if above.attr.value not in ("scale", "unscale_", "step", "update"):
                return None
            if above.attr.value == "scale" and _backward_of(conversion, call) is None:
                return None
            if above.attr.value != "scale" and not isinstance(script.parent(call), cst.Expr):
                return None
            found.append(call)
    return found


def _backward_of(conversion: Conversion, scale: cst.Call) -> cst.Call | None:
    """Return the whole call ``scaler.scale(loss).backward()``, or None."""
    attribute = conversion.script.parent(scale)
    call = conversion.script.parent(attribute) if isinstance(attribute, cst.Attribute) else None
    fits = isinstance(call, cst.Call) and isinstance(attribute, cst.Attribute) and attribute.attr.value == "backward"
    return call if fits and isinstance(call, cst.Call) and not call.args else None


def _use_helpers(conversion: Conversion, uses: list[cst.Call]) -> None:
    script, edits = conversion.script, conversion.edits
    for call in uses:
        assert isinstance(call.func, cst.Attribute)
        method = call.func.attr.value
        if method == "scale":
            whole = _backward_of(conversion, call)
            assert whole is not None
            edits.replace_span(
                script.span(call)[0], script.span(call.args[0])[0], f"{conversion.helpers.name('backward')}("
            )
            edits.replace_span(script.span(call.args[0])[1], script.span(whole)[1], ")")
            conversion.done(call, "precision", "the loss is scaled where the precision needs it")
        elif method == "update":
            edits.remove(script.small_statement_of(call))
        elif method == "unscale_":
            clip = _clip_after(conversion, call)
            if clip is None:
                conversion.rename_call(call, "unscale")
            else:
                edits.remove(script.small_statement_of(call))
        elif method == "step":
            clip = next((found for each in uses if (found := _clip_of(conversion, each, call)) is not None), None)
            conversion.rename_call(call, "optimizer_step")
            if clip is not None:
                norm = argument(clip, "max_norm", 1)
                assert norm is not None
                edits.add_argument(call, f"max_norm={script.code(norm)}")
                edits.remove(script.small_statement_of(clip))
            conversion.done(call, "precision", "unscales, clips, steps or skips, and updates the scale")


def _clip_of(conversion: Conversion, unscale: cst.Call, step: cst.Call) -> cst.Call | None:
    """Return the clip between an ``unscale_`` and a step of the same optimizer in one block, or None."""
    script = conversion.script
    assert isinstance(unscale.func, cst.Attribute)
    if unscale.func.attr.value != "unscale_" or not step.args or not unscale.args:
        return None
    same = script.siblings(script.statement_of(unscale)) is script.siblings(script.statement_of(step))
    of_one = script.code(unscale.args[0].value) == script.code(step.args[0].value)
    return _clip_after(conversion, unscale) if same and of_one else None


def _clip_after(conversion: Conversion, unscale: cst.Call) -> cst.Call | None:
    """Return the clip of all gradients in the statement right after an ``unscale_``, or None."""
    script = conversion.script
    statement = script.statement_of(unscale)
    block = script.siblings(statement)
    index = next(number for number, each in enumerate(block) if each is statement)
    following = block[index + 1] if index + 1 < len(block) else None
    match following:
        case cst.SimpleStatementLine(
            body=[cst.Expr(value=cst.Call(args=[cst.Arg(value=cst.Call(func=cst.Attribute())), _]) as clip)]
        ) if script.is_a(clip, *CLIP) and argument_node(clip, "max_norm", 1) is not None:
            return clip
    return None
