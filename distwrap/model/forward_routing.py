"""Let any method of the user's model train: one that runs a forward goes through the wrapper, a plain one does not.

Which it is shows while it runs: when the first module inside the model is called, the wrapper begins, as its own
``forward`` would have. A method that never calls one, and returns nothing that has a gradient, is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import wraps
from types import MethodType
from typing import Any, Literal

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from distwrap._internals.torch_tree import tensors_in
from distwrap.devices.transfer import to_device
from distwrap.errors import ModelError
from distwrap.model.transparent import TransparentModule, unwrap_model
from distwrap.precision import InPrecision
from distwrap.wording import unknown_name

ForwardMethods = Literal["auto"] | Iterable[str]


class RoutedModule(TransparentModule):
    """Mixin for wrappers that take part in the methods of the user's model, not in its ``forward`` alone.

    A forward computes in the model's precision; a wrapper may have more to do when it begins and when the method ends.
    """

    _forward_methods: frozenset[str] | None = None  # None: all of them
    _method: str = ""  # which one is running

    def route(self, forward_methods: ForwardMethods, in_precision: InPrecision) -> None:
        """Set which methods may be routed, whose names are known to be right, and how and where they compute."""
        own = self.__dict__
        own["_forward_methods"] = None if forward_methods == "auto" else frozenset(forward_methods)
        own["_parts"] = {id(part) for part in unwrap_model(self).modules()}
        own["_in_precision"] = in_precision

    def _looked_up(self, name: str, value: Any) -> Any:
        if type(value) is not MethodType or value.__self__ is not unwrap_model(self):
            return value
        if self._forward_methods is not None and name not in self._forward_methods:
            return value
        return self._routed(name, value)

    def _routed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._method or not self._takes_part():
                return method(*args, **kwargs)
            args, kwargs = self._moved((args, kwargs), "left")
            if self._forward_methods is not None:  # else it may be one that runs no forward
                args, kwargs = self._in_precision.inputs((args, kwargs))
            self.__dict__["_method"] = name
            try:
                with ExitStack() as inside:
                    call = MethodCall(self, inside)
                    return self._end(method(*args, **kwargs), call)
            finally:
                self.__dict__["_method"] = ""

        return run

    def _takes_part(self) -> bool:
        """Return whether there is anything to do for a forward now."""
        return True

    def _moved(self, arguments: Any, objects: Literal["changed", "left"] = "changed") -> Any:
        """Return the arguments on the model's device; what a forward changes in an object is for the caller to see."""
        return to_device(arguments, self._in_precision.device, objects)

    def _begin(self, call: MethodCall) -> bool:
        """Do what comes before a forward, and undo on ``call.inside`` what must end with the method.

        Returns whether there is more to do at a later forward.
        """
        call.inside.enter_context(self._in_precision.context())
        return False

    def _end(self, output: Any, call: MethodCall) -> Any:
        """Do what comes after a forward, and return the output."""
        is_forward = call.begun or self._forward_methods is not None
        return self._in_precision.outputs(output) if is_forward else output


class MethodCall:
    """One call of a method; it begins when a module of the model is called.

    Attributes:
        begun: whether one was.
        prepared: whether one was with gradients on, so that its backward is prepared.
        again: whether there was a forward before it that had no backward yet.
        inside: what ends with the method.
    """

    def __init__(self, model: RoutedModule, inside: ExitStack) -> None:
        self.begun = self.prepared = self.again = False
        self.inside = inside
        self._model = model
        inside.callback(self.stop)
        self.watch()
        inputs = model._in_precision.inputs
        for part in unwrap_model(model).modules() if model._in_precision.changes_inputs else ():
            handle = part.register_forward_pre_hook(lambda _, *given: inputs(given), with_kwargs=True)
            inside.callback(handle.remove)

    def watch(self) -> None:
        """Wait for the next module of the model to be called; until then every module's call is looked at."""
        self._handle = register_module_forward_pre_hook(self._on_call)

    def stop(self) -> None:
        """Look no more."""
        self._handle.remove()

    def _on_call(self, module: nn.Module, args: Any) -> None:
        if id(module) in self._model._parts:
            if not self._model._begin(self):
                self.stop()
            self.begun = True


def check_forward_methods(model: nn.Module, forward_methods: ForwardMethods) -> None:
    """Refuse names that are not those of the model's methods.

    Raises:
        ModelError: lists the right ones.
    """
    if forward_methods == "auto":
        return
    net = unwrap_model(model)
    if isinstance(forward_methods, str):
        raise ModelError(f"forward_methods={forward_methods!r}: it is 'auto', or a list of names of methods.")
    known = [name for name in dir(net) if not name.startswith("__") and not hasattr(nn.Module, name)]
    known = [name for name in known if callable(getattr(type(net), name, None))]
    for name in forward_methods:
        if name not in known:
            raise ModelError(unknown_name(f"forward method of {type(net).__name__}", name, known))


def has_gradient(output: Any) -> bool:
    """Say whether there is a tensor in any nesting through which a backward could come."""
    return any(tensor.requires_grad for tensor in tensors_in(output))
