"""A wrapped model that answers like the user's own: attributes, methods, parameter names, state dict, class.

What is looked up, set or registered on it reaches the user's model first. torch's own wrapper, as
DistributedDataParallel, may be a private object inside. Its names are reached only where the model has none of that
name, so neither side need know the other's.
"""

import copy
from collections.abc import Callable, Mapping
from functools import wraps
from types import FunctionType, MethodType
from typing import Any, TypeVar, overload

from torch import nn

from distwrap._internals.torch import compiled_module
from distwrap.errors import ModelError
from distwrap.model.state_dict import strip_module_prefix

# In a module that knows nothing of this one, the user's model.
_USERS_MODEL = "_distwrap_users_model"

# Special methods of the user's class that a wrapper has in its own way, or not at all.
_WRAPPERS_SPECIALS = {"__getnewargs__", "__getnewargs_ex__", "__class_getitem__", "__del__"}
_USERS_SPECIALS = {"__repr__", "__str__", "__format__"}
# Methods of any module that change its tensors, which the wrapper must allow: they go through `_apply`.
_CHANGES = {
    name
    for name, value in vars(nn.Module).items()
    if isinstance(value, FunctionType) and "_apply" in value.__code__.co_names and name != "_apply"
}
# Settings of DistributedDataParallel that loops change; any other public name that is set is the model's.
_SETTINGS = {"require_backward_grad_sync", "require_forward_param_sync", "broadcast_buffers", "forward_sync_buffers"}


class TransparentModule(nn.Module):
    """Wrapper that holds the user's model as ``module``, and has its names.

    Its constructor sets `module`, and a subclass has a ``forward``. What a subclass defines, and private names that the
    model lacks, are the wrapper's own. The constructor of ``nn.Module`` never runs: parameters, hooks, parts and the
    training flag are the model's. Pickled or copied, it is the plain model: a copy trains nothing with the others.
    """

    module: nn.Module
    _distwrap_model: nn.Module  # the user's, which `module` may be compiled of
    _distwrap_inner: Any = None  # torch's wrapper in it, if there is one

    def __init__(self) -> None:
        """Leave it to the subclass to set `module`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    # Attributes

    def __getattr__(self, name: str) -> Any:
        if "_distwrap_model" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no {name!r} before it has its module")
        model, inner = self._distwrap_model, self._distwrap_inner
        try:
            value = getattr(model, name)
        except AttributeError:
            if not hasattr(inner, name):
                raise
            return getattr(inner, name)
        if name == "forward":
            return self._distwrap_method(name, value)
        if type(value) is not MethodType or value.__self__ is not model:
            return value
        if name in _CHANGES and value.__func__ is getattr(nn.Module, name):
            return MethodType(value.__func__, self)
        return _fluent(self, value if hasattr(nn.Module, name) else self._distwrap_method(name, value))

    def _distwrap_method(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is called for a method of the user's model."""
        return method

    def _distwrap_moved(self) -> None:
        """Refuse a model that a method has just moved, where it had to stay."""

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if name == "module":
            model = unwrap_model(value)
            own.update(module=value, _distwrap_model=model, _distwrap_inner=value if value is not model else None)
            put_model_first(self, type(self))
        elif name in own or (name.startswith("_") and not hasattr(own.get("_distwrap_model"), name)):
            own[name] = value
        else:
            self._distwrap_set(name, value)

    def _distwrap_set(self, name: str, value: Any) -> None:
        """Set an attribute of the model, or a setting of torch's wrapper that the model does not have."""
        model, inner = self._distwrap_model, self._distwrap_inner
        if not hasattr(model, name) and hasattr(inner, name) and (name.startswith("_") or name in _SETTINGS):
            model = inner
        elif _is_ddp(self):
            refuse_unknown_parameters(model, name, value)
        setattr(model, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            del self.__dict__[name]
        else:
            delattr(self._distwrap_model, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._distwrap_model)})

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # By which ``isinstance(wrapped, UsersClass)`` holds, beside what the wrapper is itself.
        return type(self.__dict__.get("_distwrap_model", self))

    # The model as a whole

    def __copy__(self) -> nn.Module:
        return copy.copy(self._distwrap_model)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._distwrap_model,)

    def __prepare_scriptable__(self) -> nn.Module:
        # By which torch.jit.script compiles the model: a wrapper's forward takes any arguments, which it cannot read.
        return self._distwrap_model

    def train(self, mode: bool = True) -> Any:
        """Set the training flag."""
        (self._distwrap_inner or self.module).train(mode)
        return self

    def eval(self) -> Any:
        """Let training pause."""
        self.train(False)
        model = self._distwrap_model
        if type(model).eval is not nn.Module.eval:
            model.eval()
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.module._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's own state dict, without a prefix."""
        state: dict[str, Any] = self._distwrap_model.state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load weights saved with or without a wrapper."""
        model = self._distwrap_model
        if _is_ddp(self) and (kwargs.get("assign") or True in args[1:2]):
            raise ModelError(
                "load_state_dict(assign=True) on a wrapped model would replace the parameters whose gradients "
                "DDP averages, and each rank would train a model of its own (DW104). Load before wrap_model(), or "
                "leave assign out."
            )
        given = state_dict if isinstance(state_dict, dict) else dict(state_dict)  # its _metadata must come along
        return model.load_state_dict(strip_module_prefix(given, target=model), *args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # Reached when the wrapper is a part of another module, whose keys may have been saved with a wrapper in it.
        model = self._distwrap_model
        given = {key[len(prefix) :]: state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
        bare = strip_module_prefix(given, target=model)
        state_dict.update({f"{prefix}{key}": value for key, value in bare.items()})
        model._load_from_state_dict(state_dict, prefix, *args, **kwargs)


WRAPPERS = (TransparentModule, nn.parallel.DistributedDataParallel, nn.DataParallel)


def put_model_first(wrapper: TransparentModule, kind: type) -> None:
    """Make a wrapper one of its kind that has the names of torch's classes, and special methods, from the model."""
    definers = {name: each for each in reversed(kind.__mro__) for name in vars(each)}
    torchs = [name for name, each in definers.items() if each.__module__.startswith("torch.") and name[:2] != "__"]
    own = (set(dir(TransparentModule)) | _WRAPPERS_SPECIALS | ({"__deepcopy__"} & set(dir(kind)))) - _USERS_SPECIALS
    users = [each for each in type(wrapper._distwrap_model).__mro__ if each not in nn.Module.__mro__]
    specials = {name for each in users for name, value in vars(each).items() if callable(value)} - own
    attributes: dict[str, Any] = {name: _of_model(name) for name in torchs}
    attributes |= {name: _special_method(name) for name in specials if name[:2] == name[-2:] == "__"}
    attributes |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    # Behind the property of that name.
    object.__dict__["__class__"].__set__(wrapper, type(kind.__name__, (kind,), attributes))


def _of_model(name: str) -> property:
    return property(lambda wrapper: wrapper.__getattr__(name))


def _special_method(name: str) -> Callable[..., Any]:
    def run(self: TransparentModule, *args: Any, **kwargs: Any) -> Any:
        model = self._distwrap_model
        result = getattr(model, name)(*args, **kwargs)
        return self if result is model else result

    return run


def _fluent(wrapper: TransparentModule, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of the model that returns the wrapper where it would return the model."""
    model = wrapper._distwrap_model

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if result is not model:
            return result
        wrapper._distwrap_moved()
        return wrapper

    if not isinstance(method, MethodType):
        return run  # it is routed
    # A method, of which torch's compiler reads the function.
    return MethodType(wraps(method.__func__)(lambda model, *args, **kwargs: run(*args, **kwargs)), model)


def _is_ddp(wrapper: nn.Module) -> bool:
    return issubclass(type(wrapper), nn.parallel.DistributedDataParallel)


def refuse_unknown_parameters(model: nn.Module, name: str, value: Any) -> None:
    """Refuse what DDP, which took stock when it was built, would not average."""
    new = [value] if isinstance(value, nn.Parameter) else value.parameters() if isinstance(value, nn.Module) else []
    known = set(map(id, model.parameters()))
    if any(parameter.requires_grad and id(parameter) not in known for parameter in new):
        raise ModelError(
            f"{name!r} would add new parameters to a model that is wrapped already, and they would differ "
            "between the ranks. Set it before wrap_model(), or wrap unwrap_model(model) anew."
        )


Model = TypeVar("Model", bound=nn.Module)


def _same(model: nn.Module) -> nn.Module:
    return model


@overload
def unwrap_model(model: nn.DataParallel[Model]) -> Model: ...
@overload
def unwrap_model(model: nn.parallel.DistributedDataParallel) -> nn.Module: ...
@overload
def unwrap_model(model: Model) -> Model: ...


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the user's model out of any nesting of distwrap, DDP, DataParallel and torch.compile.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> unwrap_model(nn.DataParallel(model)) is model
        True
    """
    while True:
        inner = model.module if isinstance(model, WRAPPERS) else compiled_module(model)
        inner = model.__dict__.get(_USERS_MODEL) if inner is None else inner
        if inner is None:
            return model
        model = inner


def mark_users_model(wrapped: nn.Module, model: nn.Module) -> None:
    """Let `unwrap_model` find the user's model in a module that a strategy has put around it, without more tensors."""
    outer = unwrap_model(wrapped)
    if outer is not model and any(part is model for part in outer.modules()) and _count(outer) == _count(model):
        outer.__dict__[_USERS_MODEL] = model


def _count(model: nn.Module) -> int:
    return len([*model.parameters(), *model.buffers()])
