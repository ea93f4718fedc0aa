"""A wrapped model that answers like the user's own: attributes, methods, parameter names, state dict."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, overload

import torch
from torch import nn

from distwrap._internals.torch import compiled_module, submodules
from distwrap.errors import ModelError
from distwrap.model.state_dict import strip_module_prefix

# In a wrapper that knows nothing of this module, the user's model.
_USERS_MODEL = "_distwrap_users_model"

# Special methods of the user's class that a wrapper has in its own way, or not at all.
_WRAPPERS_SPECIALS = {"__getnewargs__", "__getnewargs_ex__", "__class_getitem__", "__del__"}
_USERS_SPECIALS = {"__repr__", "__str__", "__format__"}


class TransparentModule(nn.Module):
    """Mixin for wrappers that hold the user's model as ``module``.

    What the wrapper does not have itself is looked up on the model; names and keys carry no prefix. Pickled or
    copied, it is the plain model: a copy trains nothing with the others.
    """

    module: nn.Module

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Until here a wrapper's constructor sets what is its own; none of it may land on the user's model.
        self.__dict__["_built"] = True

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        return self._looked_up(name, getattr(self.module, name))

    def _looked_up(self, name: str, value: Any) -> Any:
        """Return what a look-up on the model gives: a wrapper may act on methods here."""
        return value

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # By which ``isinstance(wrapped, UsersClass)`` holds, beside what the wrapper is itself.
        own = self.__dict__
        if "_distwrap_class" not in own and "_built" in own and "module" in submodules(self):
            own["_distwrap_class"] = type(unwrap_model(self))
        users: type = own.get("_distwrap_class", type(self))
        return users

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_the_models(name):
            if isinstance(self, nn.parallel.DistributedDataParallel):
                refuse_unknown_parameters(self.module, name, value)
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)
            if name == "module":
                take_special_methods(self, type(self), unwrap_model(value))

    def _is_the_models(self, name: str) -> bool:
        if "_built" not in self.__dict__ or name == "module" or name in self.__dict__ or hasattr(type(self), name):
            return False
        return not name.startswith("_") or hasattr(self.module, name)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or name in self.__dict__.get("_modules", ()):
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    def __dir__(self) -> list[str]:
        own = super().__dir__()  # type: ignore[no-untyped-call]
        return sorted({*own, *dir(self.module)})

    def __copy__(self) -> nn.Module:
        return copy.copy(unwrap_model(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (unwrap_model(self),)

    def __prepare_scriptable__(self) -> nn.Module:
        # By which torch.jit.script compiles the model: a wrapper's forward takes any arguments, which it cannot read.
        return unwrap_model(self)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's own state dict, without a prefix."""
        state: dict[str, Any] = unwrap_model(self).state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load weights saved with or without a wrapper."""
        model = unwrap_model(self)
        if isinstance(self, nn.parallel.DistributedDataParallel) and (kwargs.get("assign") or True in args[1:2]):
            raise ModelError(
                "load_state_dict(assign=True) on a wrapped model would replace the parameters whose gradients "
                "DDP averages, and each rank would train a model of its own (DW104). Load before wrap_model(), or "
                "leave assign out."
            )
        given = state_dict if isinstance(state_dict, dict) else dict(state_dict)  # its _metadata must come along
        return model.load_state_dict(strip_module_prefix(given, target=model), *args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # Reached when the wrapper is a part of another module: its keys have no "module." there.
        inner = zip(unwrap_model(self).state_dict(), self.module.state_dict(), strict=True)
        places = {f"{prefix}{name}": f"{prefix}module.{place}" for name, place in inner}
        state_dict.update({place: state_dict.pop(key) for key, place in places.items() if key in state_dict})
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        """Set the training flag of the model itself too: its ``children()``, which torch walks, do not include it."""
        self.training = mode
        self.module.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """Apply a function to the model and what is in it."""
        self.module.apply(fn)
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # What ``.to()``, ``.half()`` and the like go through; by ``children()`` it would miss the model's own tensors.
        self.module._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Name the parameters as the model does."""
        return unwrap_model(self).named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Name the buffers as the model does."""
        return unwrap_model(self).named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Name the modules as the model does."""
        names: Iterator[tuple[str, nn.Module]] = unwrap_model(self).named_modules(*args, **kwargs)
        return names

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Name the children as the model does."""
        return unwrap_model(self).named_children()


WRAPPERS = (TransparentModule, nn.parallel.DistributedDataParallel, nn.DataParallel)


def take_special_methods(wrapper: nn.Module, kind: type, model: nn.Module) -> None:
    """Make a wrapper one of its kind that has the special methods of the model's class too, as ``__iter__``."""
    mine = (set(dir(TransparentModule)) | _WRAPPERS_SPECIALS | ({"__deepcopy__"} & set(dir(kind)))) - _USERS_SPECIALS
    methods = {
        name: _special_method(name)
        for users in type(model).__mro__
        for name, value in (vars(users).items() if users not in nn.Module.__mro__ else ())
        if name.startswith("__") and name.endswith("__") and name not in mine and callable(value)
    }
    # Behind the property of that name.
    object.__dict__["__class__"].__set__(wrapper, subclass(kind, methods) if methods else kind)


def subclass(kind: type, attributes: dict[str, Any]) -> type:
    """Make a class of the same name with more attributes."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**names, **attributes})


def _special_method(name: str) -> Callable[..., Any]:
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        model = unwrap_model(self)
        result = getattr(model, name)(*args, **kwargs)
        return self if result is model else result

    return run


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


def see_through(wrapped: nn.Module, model: nn.Module) -> None:
    """Let `unwrap_model` find the user's model in a module that a strategy has put around it, without more tensors."""
    outer = unwrap_model(wrapped)
    if outer is not model and any(part is model for part in outer.modules()) and _count(outer) == _count(model):
        outer.__dict__[_USERS_MODEL] = model


def _count(model: nn.Module) -> int:
    return len([*model.parameters(), *model.buffers()])
