"""Find the expressions from which a value comes, through assignments, parameters and attributes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from distwrap.convert.names import MOVES
from distwrap.convert.script import Function, Script, argument, path_of


class Binding(NamedTuple):
    """One assignment of a value to a name.

    Attributes:
        target: the name or attribute.
        value: the expression, or None if the value is no expression of the script, as in a ``for``.
        statement: the statement that assigns it.
        unpacked: a call whose result is unpacked into several names.
        part: the index of this name among them.
    """

    target: cst.CSTNode
    value: cst.BaseExpression | None
    statement: cst.CSTNode
    unpacked: cst.Call | None = None
    part: int = 0


class Values:
    """Look-up of the values of names, the script's functions and their callers."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.bindings: dict[tuple[Function | cst.ClassDef | None, str], list[Binding]] = defaultdict(list)
        self.functions: dict[str, Function] = {}
        self.classes: dict[str, cst.ClassDef] = {}
        for function in script.find(cst.FunctionDef):
            if script.function_of(function) is None and script.class_of(function) is None:
                self.functions[function.name.value] = function
        for each in script.find(cst.ClassDef):
            self.classes[each.name.value] = each
        self._collect()

    def _collect(self) -> None:
        for assign in self.script.find(cst.Assign):
            for target in assign.targets:
                self._bind(target.target, assign.value, assign)
        for annotated in self.script.find(cst.AnnAssign):
            self._bind(annotated.target, annotated.value, annotated)
        for added in self.script.find(cst.AugAssign):
            self._bind(added.target, None, added)
        for walrus in self.script.find(cst.NamedExpr):
            self._bind(walrus.target, walrus.value, walrus)
        for loop in self.script.find(cst.For):
            self._bind(loop.target, None, loop)
        for block in self.script.find(cst.With):
            for item in block.items:
                if item.asname is not None:
                    self._bind(item.asname.name, None, block)

    def _bind(self, target: cst.CSTNode, value: cst.BaseExpression | None, statement: cst.CSTNode) -> None:
        if isinstance(target, (cst.Tuple, cst.List)):
            values = value.elements if isinstance(value, (cst.Tuple, cst.List)) else []
            one_each = len(values) == len(target.elements)
            for index, element in enumerate(target.elements):
                given = values[index].value if one_each else None
                path = path_of(element.value)
                if isinstance(value, cst.Call) and path is not None:
                    key = (self.scope(element.value, path), path)
                    self.bindings[key].append(Binding(element.value, None, statement, value, index))
                else:
                    self._bind(element.value, given, statement)
            return
        path = path_of(target)
        if path is not None:
            self.bindings[self.scope(target, path), path].append(Binding(target, value, statement))

    def scope(self, node: cst.CSTNode, path: str) -> Function | cst.ClassDef | None:
        """Return the function of a name, or the class of an attribute of self; None at module level."""
        if path.startswith("self."):
            return self.script.class_of(node)
        return self.script.function_of(node)

    def bound(self, node: cst.CSTNode, path: str | None = None) -> list[Binding]:
        """Return the assignments of a name or attribute, in its own function or else in an enclosing scope."""
        path = path if path is not None else path_of(node)
        if path is None:
            return []
        scope = self.scope(node, path)
        if path.startswith("self."):
            return self.bindings.get((scope, path), [])
        while True:
            found = self.bindings.get((scope, path))
            if found or (scope is not None and self.parameter(scope, path) is not None):
                return found or []
            if scope is None:
                return []
            scope = self.script.function_of(scope)

    def parameter(self, function: Function | cst.ClassDef | None, name: str) -> int | None:
        """Return the position of a parameter, -1 if keyword-only, or None if the function has no such parameter."""
        if not isinstance(function, cst.FunctionDef):
            return None
        params = [*function.params.posonly_params, *function.params.params]
        for index, each in enumerate(params):
            if each.name.value == name:
                return index
        return -1 if any(each.name.value == name for each in function.params.kwonly_params) else None

    def callers(self, function: Function) -> list[cst.Call]:
        """Return the calls of a function of the file, of a method through ``self``, or of a class's ``__init__``."""
        name, owner = function.name.value, self.script.class_of(function)
        found = []
        for call in self.script.find(cst.Call):
            path = path_of(call.func)
            if owner is None:
                fits = path == name and self.script.function_of(function) is None
            elif name == "__init__":
                fits = path == owner.name.value
            else:
                fits = path == f"self.{name}" and self.script.class_of(call) is owner
            if fits:
                found.append(call)
        return found

    def sources(
        self, node: cst.CSTNode, depth: int = 6, *, returned: bool = False
    ) -> Iterator[cst.BaseExpression | None]:
        """Yield the expressions from which a value may come; None stands for an unknown one.

        A chain such as ``Net().to(device)`` is one expression; names, parameters and attributes of self are followed.

        Args:
            node: the expression to look up.
            depth: the maximum number of steps to follow.
            returned: also follow the return values of the file's functions.
        """
        path = path_of(node)
        if returned and isinstance(node, cst.Call) and path_of(node.func) in self.functions and depth:
            yield from self._returns(node, None, depth)
            return
        if path is None or depth == 0:
            yield node if isinstance(node, cst.BaseExpression) and depth else None
            return
        function = self.script.function_of(node)
        while function is not None and not path.startswith("self."):
            position = self.parameter(function, path)
            if position is not None and not self.bindings.get((function, path)):
                yield from self._from_callers(function, path, position, depth, returned)
                return
            if self.bindings.get((function, path)):
                break
            function = self.script.function_of(function)
        found = self.bound(node, path)
        if not found:
            yield from self._attribute(node, depth, returned)
        for binding in found:
            if binding.unpacked is not None and path_of(binding.unpacked.func) in self.functions:
                yield from self._returns(binding.unpacked, binding.part, depth - 1)
            elif binding.value is None:
                yield None
            elif path_of(binding.value) == path or self._is_of_itself(binding.value, path):
                continue  # model = model.to(device) does not change the source
            else:
                yield from self.sources(binding.value, depth - 1, returned=returned)

    def _attribute(self, node: cst.CSTNode, depth: int, returned: bool) -> Iterator[cst.BaseExpression | None]:
        """Yield the sources of an attribute of an object whose class is in the file."""
        owners = list(self.sources(node.value, depth - 1)) if isinstance(node, cst.Attribute) else []
        names = {path_of(each.func) if isinstance(each, cst.Call) else None for each in owners}
        name = names.pop() if len(names) == 1 else None
        found: list[Binding] = []
        if name in self.classes and isinstance(node, cst.Attribute):
            found = self.bindings.get((self.classes[name or ""], f"self.{node.attr.value}"), [])
        if not found:
            yield None
        for binding in found:
            if binding.value is None:
                yield None
            elif path_of(binding.value) != path_of(binding.target):
                yield from self.sources(binding.value, depth - 1, returned=returned)

    def _returns(self, call: cst.Call, part: int | None, depth: int) -> Iterator[cst.BaseExpression | None]:
        """Yield the sources of a return value of a function of the file, or of one part of it."""
        function = self.functions[path_of(call.func) or ""]
        for each in self.script.find(cst.Return, function):
            if self.script.function_of(each) is not function:
                continue
            value: cst.BaseExpression | None = each.value
            if part is not None:
                parts = value.elements if isinstance(value, cst.Tuple) else []
                value = parts[part].value if part < len(parts) else None
            if value is None or depth <= 0:
                yield None
            else:
                yield from self.sources(value, depth - 1, returned=True)

    def _is_of_itself(self, value: cst.BaseExpression, path: str) -> bool:
        return path_of(root_of(value)) == path

    def _from_callers(
        self, function: Function, name: str, position: int, depth: int, returned: bool
    ) -> Iterator[cst.BaseExpression | None]:
        for given in self.given(function, name, position) or [None]:
            if given is None:
                yield None
            else:
                yield from self.sources(given, depth - 1, returned=returned)

    def given(self, function: Function, name: str, position: int) -> list[cst.BaseExpression | None]:
        """Return the value that each caller passes for a parameter; None if it passes none."""
        if self.script.class_of(function) is not None:
            position -= 1  # self
        return [argument(call, name, position) for call in self.callers(function)]


def root_of(node: cst.CSTNode) -> cst.CSTNode:
    """Return the start of a chain of moves, such as ``Net()`` in ``Net().to(device).train()``."""
    while isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value in MOVES:
        node = node.func.value
    return node
