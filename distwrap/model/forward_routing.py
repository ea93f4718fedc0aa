"""Let any method of the user's model train: one that runs a forward goes through the wrapper, a plain one does not.

Which it is shows while it runs: when the first module inside the model is called, the wrapper begins, as its own
``forward`` would have. A method that never calls one, and returns nothing that has a gradient, is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import wraps
from threading import get_ident
from typing import Any, Literal
from weakref import ref

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from distwrap._internals.torch_tree import tensors_in
from distwrap.devices.transfer import to_device
from distwrap.errors import ModelError
from distwrap.model.transparent import unwrap_model
from distwrap.precision import InPrecision
from distwrap.wording import unknown_name

ForwardMethods = Literal["auto"] | Iterable[str]
Around = Callable[[Callable[..., Any]], Callable[..., Any]]  # returns what runs in the place of a forward


class Routing:
    """Work of a wrapper around the methods of the user's model and its forward.

    A forward computes in the model's precision; there may be more to do when it begins and when the method ends.

    Args:
        module: the user's model, or what is compiled of it.
        in_precision: how to compute, and where.
        forward_methods: which methods may be routed, whose names are known to be right.

    Attributes:
        forward: runs the model's forward.
        dressed: what is called in its place, while something looks at calls or runs around them.
        inner: torch's wrapper, if there is one.
        buffers: `Buffers` that ranks take over from rank 0 when training pauses, if there are any.
        method: which method is running.
    """

    forward: Callable[..., Any]
    dressed: Callable[..., Any] | None = None
    inner: Any = None
    buffers: Any = None
    method: str = ""

    def __init__(self, module: nn.Module, in_precision: InPrecision, forward_methods: ForwardMethods) -> None:
        self.module, self.model = module, unwrap_model(module)
        self._forward_methods = None if forward_methods == "auto" else frozenset(forward_methods)
        self._parts = {id(part) for part in self.model.modules()}
        self._in_precision = in_precision
        self._plain = in_precision.is_plain and in_precision.device.type == "cpu"
        self._look: Callable[[Any], object] | None = None
        self._around: Around | None = None

    @property
    def is_looked_at(self) -> bool:
        """Whether something looks at the inputs of each call."""
        return self._look is not None

    def look_with(self, look: Callable[[Any], object] | None) -> None:
        """Let a function look at the inputs of each call from now on; ``None``: nothing does, and nothing is paid."""
        self._look = look
        self._dress()

    def put_around(self, around: Around | None) -> None:
        """Let something run around each forward from now on; ``None``: nothing does, and nothing is paid."""
        self._around = around
        self._dress()

    def _dress(self) -> None:
        itself, look = ref(self), self._look  # which would else hold itself, and the model

        def run(*args: Any, **kwargs: Any) -> Any:
            routing = itself()
            assert routing is not None  # it calls this
            if look is not None and not routing.method:  # which was looked at
                look((args, kwargs))
            return routing.forward(*args, **kwargs)

        self.dressed = self._around(run) if self._around is not None else run if look is not None else None

    def looked_up(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is called for a method of the user's model, of which ``forward`` is one."""
        if self._forward_methods is not None and name not in self._forward_methods and name != "forward":
            return method
        routed = self._routed(name, method)
        return routed if self._around is None else self._around(routed)

    def train(self, mode: bool, *, pauses: bool) -> None:
        """Do what comes after the training flag was set; when training `pauses`, take over rank 0's buffers."""
        if pauses and self.buffers is not None:
            self.buffers.pause()

    def _routed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.method or not self._takes_part():
                return method(*args, **kwargs)
            if self._look is not None:
                self._look((args, kwargs))
            args, kwargs = self._moved((args, kwargs), "left")
            if self._forward_methods is not None:  # else it may be one that runs no forward
                args, kwargs = self._in_precision.inputs((args, kwargs))
            self.method = name
            try:
                with ExitStack() as inside:
                    call = MethodCall(self, inside)
                    return self._end(method(*args, **kwargs), call)
            finally:
                self.method = ""

        return run

    def _takes_part(self) -> bool:
        """Return whether there is anything to do for a forward now."""
        return True

    def _placed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward that computes in the model's precision, on its device."""

        def there(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._moved((args, kwargs))
            return forward(*args, **kwargs)

        return self._in_precision(there)

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

    def __init__(self, model: Routing, inside: ExitStack) -> None:
        self.begun = self.prepared = self.again = False
        self.inside = inside
        self._model, self._thread = model, get_ident()
        inside.callback(self.stop)
        self.watch()
        inputs = model._in_precision.inputs
        for part in model.model.modules() if model._in_precision.changes_inputs else ():
            handle = part.register_forward_pre_hook(lambda _, *given: inputs(given), with_kwargs=True)
            inside.callback(handle.remove)

    def watch(self) -> None:
        """Wait for the next module of the model to be called; until then every module's call is looked at."""
        self._handle = register_module_forward_pre_hook(self._on_call)

    def stop(self) -> None:
        """Look no more."""
        self._handle.remove()

    def _on_call(self, module: nn.Module, args: Any) -> None:
        if id(module) not in self._model._parts or get_ident() != self._thread:  # another thread evaluates the model
            return
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
    """Return whether a nesting holds a computed tensor through which a backward could come, and not only parameters."""
    return any(tensor.grad_fn is not None for tensor in tensors_in(output))


def put_back_forward(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    """Give a module the forward that it had as an attribute of its own; ``None``: that of its class."""
    vars(module).pop("forward", None)
    if forward is not None:
        module.forward = forward
