"""Wrap the models that an optimizer trains, where they are made or right before the optimizer."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.facts import is_parameters
from distwrap.convert.names import MOVES
from distwrap.convert.script import path_of
from distwrap.convert.values import root_of


def models_of(conversion: Conversion) -> list[tuple[cst.Call, cst.BaseExpression]]:
    """Return each optimizer's call with each model that it trains."""
    facts = conversion.facts
    return [(call, model) for call in facts.optimizer_calls() for model in facts.trained_by(call)]


def constructions(conversion: Conversion, model: cst.BaseExpression) -> list[cst.BaseExpression | None]:
    """Return the expressions that make a model; None stands for an unknown one."""
    return list(dict.fromkeys(conversion.facts.values.sources(model)))


def wrap_models(conversion: Conversion) -> bool:
    """Wrap all models that are trained; return whether this succeeded for all."""
    whole, seen = True, set()
    for optimizer, model in models_of(conversion):
        path = path_of(model)
        if path is None or path in seen or path in conversion.wrapped:
            continue
        seen.add(path)
        if path == "self":
            conversion.unsure(optimizer, "wrap_model", "the model makes its own optimizer", "make it outside")
            whole = False
        else:
            whole = _wrap_one(conversion, optimizer, model, path) and whole
    return whole


def _wrap_one(conversion: Conversion, optimizer: cst.Call, model: cst.BaseExpression, path: str) -> bool:
    script, values = conversion.script, conversion.facts.values
    made = constructions(conversion, model)
    known = [each for each in made if isinstance(root_of(each), cst.Call)] if None not in made else []  # type: ignore[arg-type]
    done = [each for each in known if each is not None and each in conversion.wrapped_expressions]
    if any(each in conversion.wrapped_expressions for each in made):
        conversion.wrapped.add(path)
        return True
    if (
        known
        and len(known) == len(made)
        and not any(_is_touched(conversion, each, optimizer) for each in known if each)
    ):
        for each in known:
            if each is not None and each not in done:
                conversion.wrapped_expressions.add(each)
                conversion.wrap(each, "wrap_model")
                conversion.done(each, "wrap_model", f"{path} is trained, so its gradients are averaged over the ranks")
        conversion.wrapped.add(path)
        return True
    statement = script.small_statement_of(optimizer)
    function = script.function_of(optimizer)
    is_own = bool(values.bindings.get((values.scope(model, path), path)))
    calls = values.callers(function) if function is not None else []
    may_stand = conversion.edits.has_line_of_its_own(statement) and (is_own or len(calls) <= 1)
    may_stand = may_stand and not isinstance(statement, cst.For)  # a loop that updates by hand runs for every batch
    if may_stand and _first_use(conversion, optimizer, path, statement):
        return True
    conversion.unsure(
        optimizer, "wrap_model", f"it is not clear where {path} is made, or what happens to it before",
        f"{path} = wrap_model({path}) when it is complete, before it trains",
    )  # fmt: skip
    return False


def _first_use(conversion: Conversion, optimizer: cst.Call, path: str, statement: cst.CSTNode) -> bool:
    """Wrap a model right above its optimizer's statement, unless its name belongs to an outer scope."""
    script = conversion.script
    if script.function_of(optimizer) is not None and _is_of_outer_function(conversion, optimizer, path):
        return False
    conversion.edits.line_before(statement, f"{path} = {conversion.call('wrap_model', path)}")
    conversion.done(optimizer, "wrap_model", f"{path} is complete here, and its gradients are averaged from now on")
    conversion.wrapped.add(path)
    return True


def _is_of_outer_function(conversion: Conversion, node: cst.CSTNode, path: str) -> bool:
    """Return whether a name belongs to an outer function or the module, so a function cannot assign it."""
    values, function = conversion.facts.values, conversion.script.function_of(node)
    if path.startswith("self."):
        return False
    return not values.bindings.get((function, path)) and values.parameter(function, path) is None


def _is_touched(conversion: Conversion, made: cst.BaseExpression, optimizer: cst.Call) -> bool:
    """Return whether a model may be changed or passed on between its creation and that of its optimizer."""
    script = conversion.script
    statement = script.small_statement_of(made)
    binding = next(
        (each for found in conversion.facts.values.bindings.values() for each in found if each.value is made), None
    )
    path = path_of(binding.target) if binding is not None else None
    if path is None:
        return False
    scope = script.function_of(made) or script.tree
    end = script.span(_outermost_loop(conversion, optimizer) if is_parameters(optimizer) else optimizer)[0]
    if not script.inside(optimizer, scope) or script.function_of(optimizer) is not script.function_of(made):
        end = _first_call_to(conversion, script.function_of(optimizer), scope, script.span(statement)[1])
    begin, own = script.span(statement)[1], script.function_of(made)
    called = _called_between(conversion, scope, begin, end)
    for node in script.nodes(scope):
        if path_of(node) != path or _is_harmless(conversion, node, path):
            continue
        function = script.function_of(node)
        if begin <= script.span(node)[0] < end if function is own else function in called:
            return True
    return False


def _outermost_loop(conversion: Conversion, node: cst.CSTNode) -> cst.CSTNode:
    """Return the outermost loop around a piece of code in its function, or the code itself."""
    found = node
    for each in conversion.script.ancestors(node):
        if isinstance(each, cst.FunctionDef):
            break
        found = each if isinstance(each, (cst.For, cst.While)) else found
    return found


def _called_between(conversion: Conversion, scope: cst.CSTNode, begin: int, end: int) -> set[cst.FunctionDef]:
    """Return the functions that a part of a scope calls, also indirectly."""
    script, facts = conversion.script, conversion.facts
    found: set[cst.FunctionDef] = set()
    own = scope if isinstance(scope, cst.FunctionDef) else None
    for call in script.find(cst.Call, scope):
        function = facts.values.functions.get(path_of(call.func) or "")
        if function is not None and begin <= script.span(call)[0] < end and script.function_of(call) is own:
            found |= {function} | facts.reached(function)
    return found


def _first_call_to(conversion: Conversion, function: cst.FunctionDef | None, scope: cst.CSTNode, start: int) -> int:
    """Return the place of the first call in a scope that leads to a function, or the scope's end."""
    script, facts = conversion.script, conversion.facts
    for call in script.find(cst.Call, scope):
        if script.span(call)[0] < start or function is None:
            continue
        name = path_of(call.func) or ""
        target = facts.values.functions.get(name)
        is_method = name.partition(".")[2] == function.name.value or name in facts.values.classes
        if is_method or (target is not None and (target is function or function in facts.reached(target))):
            return script.span(call)[0]
    return script.span(scope)[1]


def _is_harmless(conversion: Conversion, node: cst.CSTNode, path: str) -> bool:
    """Return whether a use of a model only moves it or reads it."""
    script = conversion.script
    statement = script.small_statement_of(node)
    if isinstance(statement, cst.Assign) and [path_of(each.target) for each in statement.targets] == [path]:
        return node is statement.targets[0].target or path_of(root_of(statement.value)) == path
    above = script.parent(node)
    if isinstance(above, cst.Attribute):
        if isinstance(statement, cst.Expr) and above.attr.value in ("to", "cuda", "train"):
            return path_of(root_of(statement.value)) == path and above.attr.value in MOVES
        return above.attr.value in ("parameters", "named_parameters") and not isinstance(statement, cst.For)
    if isinstance(statement, cst.Return):
        return True
    return isinstance(above, cst.Arg) and script.is_a(script.parent(above), "builtins.print", "builtins.repr")
