"""Facts about a script: its training loops, the models that their optimizers train, its loaders and its entry point."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import libcst as cst

from distwrap.convert.names import LOADER
from distwrap.convert.script import Function, Script, path_of
from distwrap.convert.values import Values, root_of

_SAME_ITEMS = ("builtins.enumerate", "builtins.iter")
Loop = cst.For | cst.While


@dataclass(frozen=True, eq=False)
class TrainingLoop:
    """A loop that calls ``backward`` and an optimizer's ``step``, or updates the weights by hand.

    Attributes:
        loop: the ``for`` or ``while`` statement.
        step: the last call or statement that updates the weights.
        optimizers: expressions for the optimizers; ``model.parameters()`` if the loop updates by hand.
        body: the code that contains the step: the loop itself, or a function that it calls.
    """

    loop: Loop
    step: cst.CSTNode
    optimizers: list[cst.BaseExpression]
    body: cst.CSTNode


class ScriptFacts:
    """Facts about a script that trains."""

    def __init__(self, script: Script) -> None:
        self.script, self.values = script, Values(script)

    # Loops

    @cached_property
    def training_loops(self) -> list[TrainingLoop]:
        """The innermost loops that train, in the order of the text."""
        found: dict[int, TrainingLoop] = {}
        for call, optimizer in self._steps():
            for loop, body in self._loops_around(call):
                if any(self.script.method_calls("backward", body)):
                    others = found[id(loop)].optimizers if id(loop) in found else []
                    found[id(loop)] = TrainingLoop(loop, call, [*others, optimizer], body)
                    break
        return sorted(found.values(), key=lambda each: self.script.span(each.loop))

    def _steps(self) -> Iterator[tuple[cst.CSTNode, cst.BaseExpression]]:
        """Yield each step with its optimizer, or with the parameters that a loop updates by hand."""
        for call, attribute in self.script.method_calls("step"):
            if not self.is_scheduler(attribute.value):
                yield call, self._scaled(call) or attribute.value
        for loop in self.script.find(cst.For):
            given = loop.iter
            if isinstance(given, cst.Call) and isinstance(given.func, cst.Attribute) and is_parameters(given):
                name = path_of(loop.target)
                changed = next((each for each in _changes(self.script, loop) if _of_gradient(self.script, each)), None)
                if changed is not None and name is not None:
                    yield changed, given

    def _scaled(self, call: cst.Call) -> cst.BaseExpression | None:
        """Return the optimizer of ``scaler.step(optimizer)``."""
        assert isinstance(call.func, cst.Attribute)
        sources = [each for each in self.values.sources(call.func.value) if each is not None]
        if call.args and any(
            isinstance(each, cst.Call) and (path_of(each.func) or "").split(".")[-1] == "GradScaler" for each in sources
        ):
            return call.args[0].value
        return None

    def is_scheduler(self, node: cst.CSTNode) -> bool:
        """Return whether an expression is a learning rate scheduler, not an optimizer."""
        for each in self.values.sources(node):
            if isinstance(each, cst.Call):
                names = self.script.names(each.func)
                if any("lr_scheduler" in name or name.endswith(("LR", "Scheduler", "_schedule")) for name in names):
                    return True
                if "optim" in (path_of(each.func) or "") and "sched" in (path_of(each.func) or "").lower():
                    return True
        return "sched" in (path_of(node) or "").lower()

    def _loops_around(self, node: cst.CSTNode) -> Iterator[tuple[Loop, cst.CSTNode]]:
        """Yield the loops around a step, and those around calls of the function that contains it."""
        for each in self.script.ancestors(node):
            if isinstance(each, (cst.For, cst.While)):
                yield each, each
            if isinstance(each, cst.FunctionDef):
                for call in self.values.callers(each):
                    if self.script.function_of(call) is not each:
                        for loop in self.script.ancestors(call):
                            if isinstance(loop, (cst.For, cst.While)):
                                yield loop, each
                return

    # Loaders

    def iterated(self, loop: Loop | cst.CompFor) -> cst.BaseExpression:
        """Return the iterable of a loop without ``enumerate`` and progress bars; for a ``while``, its test."""
        if isinstance(loop, cst.While):
            return loop.test
        node: cst.BaseExpression = loop.iter
        while isinstance(node, cst.Call) and node.args:
            if not self._passes_on(node):
                break
            node = node.args[0].value
        return node

    def _passes_on(self, node: cst.Call) -> bool:
        """Return whether a call yields the items of its first argument, as ``enumerate`` and progress bars do."""
        return self.script.is_a(node, *_SAME_ITEMS) or any(
            name.split(".")[0] == "tqdm" for name in self.script.names(node.func)
        )

    def loader_of(self, node: cst.CSTNode) -> list[cst.Call | None]:
        """Return the calls of ``DataLoader`` that may give a value; None stands for any other source."""
        found: list[cst.Call | None] = []
        for each in self.values.sources(node, returned=True):
            while isinstance(each, cst.Call) and each.args and self._passes_on(each):
                inner = list(self.values.sources(each.args[0].value, returned=True))
                each = inner[0] if len(inner) == 1 else None
            found.append(each if isinstance(each, cst.Call) and self.script.is_a(each, *LOADER) else None)
        return found

    @cached_property
    def loaders(self) -> list[cst.Call]:
        """All calls of ``DataLoader``."""
        return list(self.script.calls(*LOADER))

    @cached_property
    def training_loaders(self) -> set[cst.Call]:
        """The calls of ``DataLoader`` whose loaders a training loop iterates over."""
        return {
            call
            for each in self.training_loops
            for call in self.loader_of(self.iterated(each.loop))
            if call is not None
        }

    def loops_over(self, loader: cst.Call) -> list[cst.For]:
        """Return the loops that iterate over a loader."""
        return [loop for loop in self.script.find(cst.For) if loader in self.loader_of(self.iterated(loop))]

    def mentions(self, loader: cst.Call) -> Iterator[cst.BaseExpression]:
        """Yield the reads of names and attributes that may hold a loader."""
        known: dict[tuple[object, str], bool] = {}
        for node in self.script.expressions():
            path = path_of(node)
            above = self.script.parent(node)
            if path is None or isinstance(above, (cst.AssignTarget, cst.Param, cst.ImportAlias)):
                continue
            if isinstance(above, cst.Attribute) and not (above.value is node and isinstance(node, cst.Name)):
                continue
            if isinstance(above, cst.Arg) and above.keyword is node:
                continue
            key = (self.script.function_of(node), path)
            if key not in known:
                known[key] = loader in self.loader_of(node)
            if known[key]:
                yield node

    # Models

    def optimizer_calls(self) -> list[cst.Call]:
        """Return the calls that make the optimizers of the training loops."""
        found: dict[cst.Call, None] = {}
        for each in self.training_loops:
            for source in [one for optimizer in each.optimizers for one in self.values.sources(optimizer)]:
                source = source if source is None else root_of(source)  # type: ignore[assignment]
                if isinstance(source, cst.Call) and list(self.trained_by(source)):
                    found[source] = None
        return list(found)

    def trained_by(self, optimizer: cst.Call, depth: int = 3) -> Iterator[cst.BaseExpression]:
        """Yield the expressions for the models whose parameters an optimizer gets, without repeats."""
        if self._makes_its_optimizer(optimizer) and isinstance(optimizer.func, cst.Attribute):
            yield self._whole(optimizer.func.value)
            return
        seen = set()
        waiting: list[cst.CSTNode] = [arg.value for arg in optimizer.args]
        for _ in range(depth):
            following: list[cst.CSTNode] = []
            for node in waiting:
                for call in self.script.find(cst.Call, node):
                    if isinstance(call.func, cst.Attribute) and is_parameters(call):
                        model = self._whole(call.func.value)
                        key = path_of(model)
                        if key is not None and key not in seen:
                            seen.add(key)
                            yield model
                path = path_of(node)
                if path is not None:
                    following += [each for each in self.values.sources(node) if each is not None]
            waiting = following

    def _makes_its_optimizer(self, call: cst.Call) -> bool:
        """Return whether a call is a model's own method that returns its optimizer or parameters."""
        if not isinstance(call.func, cst.Attribute):
            return False
        name = call.func.attr.value
        methods = [
            each
            for owner in self.values.classes.values()
            for each in self.script.find(cst.FunctionDef, owner)
            if each.name.value == name
        ]
        return (
            is_parameters(call)
            or name in ("configure_optimizers", "configure_optimizer")
            or any(
                other.startswith("torch.optim.") and "lr_scheduler" not in other
                for method in methods
                for inner in self.script.find(cst.Call, method)
                for other in self.script.names(inner.func)
            )
        )

    def _whole(self, node: cst.BaseExpression) -> cst.BaseExpression:
        """Return the whole model of a part, such as ``model`` for ``model.head`` or ``model.module``."""
        while isinstance(node, (cst.Attribute, cst.Subscript)):
            if path_of(node.value) == "self" or isinstance(node.value, cst.Call):
                break
            node = node.value
        return node

    # Entry point

    def reached(self, start: cst.CSTNode) -> set[Function]:
        """Return the functions that a piece of code may call, also indirectly; for a class, all its methods."""
        found: set[Function] = set()
        waiting: list[cst.CSTNode] = [start]
        while waiting:
            node = waiting.pop()
            for name in self.script.find(cst.Name, node):
                function = self.values.functions.get(name.value)
                each: list[Function] = [function] if function is not None else []
                owner = self.values.classes.get(name.value)
                if owner is not None and not self.script.inside(node, owner):
                    each += list(self.script.find(cst.FunctionDef, owner))
                for one in each:
                    if one not in found and one is not start:
                        found.add(one)
                        waiting.append(one)
            for inner in self.script.find(cst.FunctionDef, node):
                if inner is not start:
                    found.add(inner)
        return found

    def holds(self, start: Function, node: cst.CSTNode) -> bool:
        """Return whether a function runs a node, itself or through the functions that it calls."""
        return self.script.inside(node, start) or any(self.script.inside(node, each) for each in self.reached(start))

    @cached_property
    def guard(self) -> cst.If | None:
        """The script's ``if __name__ == "__main__":``, or None."""
        for each in self.script.tree.body:
            if isinstance(each, cst.If) and self.script.code(each.test).replace("'", '"') in (
                '__name__ == "__main__"',
                '"__main__" == __name__',
            ):
                return each
        return None


def is_parameters(call: cst.Call) -> bool:
    """Return whether a call asks a model for its parameters."""
    return isinstance(call.func, cst.Attribute) and call.func.attr.value in ("parameters", "named_parameters")


def _changes(script: Script, loop: cst.For) -> Iterator[cst.CSTNode]:
    """Yield the calls and statements that may change a parameter in place."""
    yield from script.find(cst.AugAssign, loop.body)
    for method in ("add_", "sub_", "copy_"):
        yield from (call for call, _ in script.method_calls(method, loop.body))


def _of_gradient(script: Script, node: cst.CSTNode) -> bool:
    """Return whether a parameter is updated with its gradient: ``p.data.add_(p.grad)``, ``p -= lr * p.grad``."""
    given: list[cst.CSTNode] = [node.value] if isinstance(node, cst.AugAssign) else []
    given += [arg.value for arg in node.args] if isinstance(node, cst.Call) else []
    changed = node.target if isinstance(node, cst.AugAssign) else getattr(node, "func", node)
    return ".grad" not in script.code(changed) and any(
        inner.attr.value == "grad" for each in given for inner in script.find(cst.Attribute, each)
    )
