"""Follow an object that is passed between functions, so that its arguments and parameters can be removed."""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.script import Function, path_of


@dataclass
class HandedObject:
    """Arguments and parameters that pass an object between functions.

    Attributes:
        names: names that hold the object, in any function or at module level.
        arguments: calls, each with an argument that passes the object.
        parameters: functions, each with the parameter that takes the object.
    """

    names: set[str]
    arguments: list[tuple[cst.Call, cst.Arg]] = field(default_factory=list)
    parameters: dict[Function, cst.Param] = field(default_factory=dict)

    def is_part(self, node: cst.CSTNode | None) -> bool:
        """Return whether a node is one of these arguments or parameters."""
        return any(node is arg for _, arg in self.arguments) or any(node is param for param in self.parameters.values())

    def remove(self, conversion: Conversion) -> None:
        """Remove the arguments and the parameters."""
        for call, arg in self.arguments:
            conversion.edits.remove_argument(call, arg)
        for function, param in self.parameters.items():
            _remove_parameter(conversion, function, param)
            conversion.done(
                function, "object", f"{param.name.value} is no argument any more, since helpers are functions"
            )


def find_where_handed(conversion: Conversion, names: set[str]) -> HandedObject | None:
    """Return where an object is passed, or None if a use cannot be followed."""
    handed, known = HandedObject(set(names)), -1
    while known < len(handed.names) + len(handed.arguments):
        known = len(handed.names) + len(handed.arguments)
        for call in conversion.script.find(cst.Call):
            for arg in call.args:
                is_new = not any(arg is each for _, each in handed.arguments)
                holds = isinstance(arg.value, cst.Name) and arg.value.value in handed.names
                if holds and is_new and not _note_argument(conversion, handed, call, arg):
                    return None
    for function in handed.parameters:
        calls = conversion.facts.values.callers(function)
        given = [call for call, _ in handed.arguments]
        uses = list(conversion.script.reads(function.name.value))
        if not all(call in given for call in calls) or len(uses) != len(calls):
            conversion.unsure(function, "object", "not all of its calls hand the object on", "one function for all")
            return None
    return handed


def _note_argument(conversion: Conversion, handed: HandedObject, call: cst.Call, arg: cst.Arg) -> bool:
    """Record an argument with the parameter that takes it; return whether the parameter is known."""
    function = conversion.facts.values.functions.get(path_of(call.func) or "")
    param = _parameter(function, call, arg) if function is not None else None
    if function is None or param is None or handed.parameters.get(function, param) is not param:
        conversion.unsure(arg, "object", "it is handed on, so not all of its uses can be seen", "one function for all")
        return False
    handed.arguments.append((call, arg))
    handed.parameters[function] = param
    handed.names.add(param.name.value)
    return True


def _parameter(function: Function, call: cst.Call, arg: cst.Arg) -> cst.Param | None:
    params = [*function.params.posonly_params, *function.params.params]
    if any(each.star for each in call.args):
        return None
    if arg.keyword is not None:
        every = [*params, *function.params.kwonly_params]
        return next((each for each in every if each.name.value == arg.keyword.value), None)
    position = next(number for number, each in enumerate(call.args) if each is arg)
    return params[position] if position < len(params) else None


def _remove_parameter(conversion: Conversion, function: Function, param: cst.Param) -> None:
    script = conversion.script
    params = [*function.params.posonly_params, *function.params.params, *function.params.kwonly_params]
    index = next(number for number, each in enumerate(params) if each is param)
    start, end = script.span(param)
    if index + 1 < len(params):
        end = script.span(params[index + 1])[0]
    elif index > 0:
        before = params[index - 1]
        start = script.span(before.default or (before.annotation.annotation if before.annotation else before.name))[1]
        end = script.span(param.default or (param.annotation.annotation if param.annotation else param.name))[1]
    conversion.edits.replace_span(start, end, "")
