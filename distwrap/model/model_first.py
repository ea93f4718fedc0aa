"""A wrapper with one name of its own: what is looked up, set or registered on it reaches the user's model first.

torch's own wrapper, as DistributedDataParallel, is a private object inside. Its names are reached only where the model
has none of that name, so neither side need know the other's.
"""

from collections.abc import Callable
from functools import cache, wraps
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distwrap._internals.torch import ASKED_BY_DDP
from distwrap.errors import ModelError
from distwrap.group.world import current_world
from distwrap.model.forward_routing import Routing
from distwrap.model.state_dict import strip_module_prefix
from distwrap.model.transparent import TransparentModule, refuse_unknown_parameters, subclass, take_special_methods
from distwrap.model.wrapped_models import Handle, WrappedModels

# What a wrapper does in its own way, also where the model's class overrides it.
_OWN = {"module", "forward", "train", "eval", "state_dict", "load_state_dict", "_apply", "_load_from_state_dict"}
# Methods of any module that change its tensors, which the wrapper must allow: they go through `_apply`.
_CHANGES = {
    name
    for name, value in vars(nn.Module).items()
    if isinstance(value, FunctionType) and "_apply" in value.__code__.co_names and name not in _OWN
}
# Settings of DistributedDataParallel that loops change; any other public name that is set is the model's.
_SETTINGS = {"require_backward_grad_sync", "require_forward_param_sync", "broadcast_buffers", "forward_sync_buffers"}


class ModelFirst(TransparentModule):
    """Wrapper whose names are the model's, and only then torch's wrapper's.

    It never runs the constructor of ``nn.Module``: parameters, hooks, parts and the training flag are the model's.
    """

    _distwrap_routing: Any  # a `Routing`, which only the wrapper itself reads; for others there is `handle_of`

    def __init__(self, routing: Routing, **parts: Any) -> None:
        self.__dict__.update(_distwrap_routing=routing, module=routing.module, _distwrap_class=type(routing.model))
        put_model_first(self, type(self))
        current_world().part(WrappedModels).handles[self] = Handle(routing, **parts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._distwrap_routing.run(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, as a call does."""
        return self._distwrap_routing.run(*args, **kwargs)

    # Attributes

    def __getattr__(self, name: str) -> Any:
        routing = self.__dict__["_distwrap_routing"]
        if name == ASKED_BY_DDP:
            raise ModelError(
                f"DistributedDataParallel got a {type(routing.model).__name__} that wrap_model() has wrapped, which "
                f"exchanges its gradients already. Use what wrap_model() returns as it is."
            )
        try:
            value = getattr(routing.model, name)
        except AttributeError:
            if not hasattr(routing.inner, name):
                raise
            return getattr(routing.inner, name)
        if type(value) is not MethodType or value.__self__ is not routing.model:
            return value
        if name in _CHANGES and value.__func__ is getattr(nn.Module, name):
            return MethodType(value.__func__, self)
        return _fluent(self, value if hasattr(nn.Module, name) else routing.looked_up(name, value))

    def __setattr__(self, name: str, value: Any) -> None:
        model, inner = self._distwrap_routing.model, self._distwrap_routing.inner
        if not hasattr(model, name) and hasattr(inner, name) and (name.startswith("_") or name in _SETTINGS):
            model = inner
        elif issubclass(type(self), DistributedDataParallel):
            refuse_unknown_parameters(model, name, value)
        setattr(model, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._distwrap_routing.model, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._distwrap_routing.model)})

    # The model as a whole

    def train(self, mode: bool = True) -> Any:
        """Set the training flag."""
        (self._distwrap_routing.inner or self.module).train(mode)
        return self

    def eval(self) -> Any:
        """Let training pause."""
        self.train(False)
        model = self._distwrap_routing.model
        if type(model).eval is not nn.Module.eval:
            model.eval()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # Reached when the wrapper is a part of another module, whose keys may have been saved with a wrapper in it.
        model = self._distwrap_routing.model
        given = {key[len(prefix) :]: state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
        bare = strip_module_prefix(given, target=model)
        state_dict.update({f"{prefix}{key}": value for key, value in bare.items()})
        model._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def put_model_first(wrapper: ModelFirst, kind: Any) -> None:
    """Make a wrapper one of its kind in which the names of torch's classes are the model's too, and special methods."""
    take_special_methods(wrapper, _model_first(kind), wrapper._distwrap_routing.model)


@cache
def _model_first(kind: type[ModelFirst]) -> type:
    names = {name for name in dir(kind) if name not in _OWN and not name.startswith(("__", "_distwrap"))}
    return subclass(kind, {name: _of_model(name) for name in names})


def _of_model(name: str) -> property:
    return property(lambda wrapper: wrapper.__getattr__(name))


def _fluent(wrapper: ModelFirst, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of the model that returns the wrapper where it would return the model."""
    routing = wrapper._distwrap_routing

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if result is not routing.model:
            return result
        routing.check_place()
        return wrapper

    if not isinstance(method, MethodType):
        return run  # it is routed
    return MethodType(wraps(method.__func__)(lambda model, *args, **kwargs: run(*args, **kwargs)), routing.model)
