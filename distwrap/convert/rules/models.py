"""Wrap the models that an optimizer trains, in a line of its own above the optimizer, where they are complete."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.facts import ScriptFacts
from distwrap.convert.names import TRACERS
from distwrap.convert.script import path_of
from distwrap.convert.values import root_of


def models_of(facts: ScriptFacts) -> list[tuple[cst.Call, cst.BaseExpression]]:
    """Return each optimizer's call with each model that it trains."""
    return [(call, model) for call in facts.optimizer_calls() for model in facts.trained_by(call)]


def wrap_models(conversion: Conversion) -> bool:
    """Wrap all models that are trained; return whether this succeeded for all."""
    whole, seen = True, dict[tuple[object, str], None]()
    for optimizer, model in models_of(conversion.facts):
        place = _place(conversion, optimizer, path_of(model) or "")
        if place is None:
            conversion.unsure(
                optimizer, "wrap_model", f"it is not clear where {conversion.script.code(model)} is made",
                "model = wrap_model(model) when it is complete, before its optimizer is made",
            )  # fmt: skip
            whole = False
            continue
        statement, path = place
        conversion.wrapped |= {path, path_of(model) or ""}
        key = (conversion.facts.values.scope(statement, path), path)
        if key not in seen:
            seen[key] = None
            conversion.edits.line_before(statement, f"{path} = {conversion.call('wrap_model', path)}")
            conversion.done(statement, "wrap_model", f"{path} is complete here: its gradients are averaged from now on")
    return whole


def use_bare_models(conversion: Conversion) -> None:
    """Give tracers the model without its wrapper, and name moves of a model that trains, which its wrapper forbids."""
    script, facts = conversion.script, conversion.facts
    traced = [*script.calls(*TRACERS), *(call for call, _ in script.method_calls("add_graph"))]
    for call in traced:
        if call.args and path_of(call.args[0].value) in conversion.wrapped and conversion.may_change(call):
            conversion.wrap(call.args[0].value, "unwrap_model")
            conversion.done(call, "unwrap_model", "it reads the model itself")
    begin = min((script.span(each.loop)[0] for each in facts.training_loops), default=0)
    for call in (call for method in ("cpu", "half", "double", "bfloat16") for call, _ in script.method_calls(method)):
        if path_of(root_of(call)) in conversion.wrapped and begin < script.span(call)[0]:
            conversion.todo(
                call, "moved", "a wrapped model is neither moved nor cast in place",
                "a copy of it, copy.deepcopy(unwrap_model(model)), at the end",
            )  # fmt: skip


def _place(
    conversion: Conversion, node: cst.CSTNode, path: str, depth: int = 4
) -> tuple[cst.BaseStatement, str] | None:
    """Return the statement above which a model can be wrapped, with its name there: where the name is assigned.

    A parameter belongs to the caller, if there is one alone.
    """
    script, values = conversion.script, conversion.facts.values
    if not path or path == "self" or not depth:
        return None
    function = script.function_of(node)
    position = None if path.startswith("self.") else values.parameter(function, path)
    if function is not None and position is not None and not values.bindings.get((function, path)):
        calls, given = values.callers(function), values.given(function, path, position)
        return _place(conversion, calls[0], path_of(given[0]) or "", depth - 1) if len(given) == 1 else None
    made = values.bindings.get((values.scope(node, path), path), [])
    if not made:  # of the file, which a function reads
        calls = values.callers(function) if function is not None else []
        return _place(conversion, calls[0], path, depth - 1) if len(calls) == 1 else None
    statement = script.statement_of(node)
    for each in script.ancestors(statement):  # above branches and loops that do not make the model
        if isinstance(each, (cst.FunctionDef, cst.ClassDef)) or each is conversion.facts.guard:
            break
        if isinstance(each, cst.BaseCompoundStatement) and not any(script.inside(one.target, each) for one in made):
            statement = each
    first = conversion.edits.line_start(script.span(statement)[0])
    above = script.data[first : script.span(statement)[0]]
    return None if above.strip() else (statement, path)
