"""What our decorators make of a function: a wrapper that binds to instances, copies and pickles."""

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import wrapt

if TYPE_CHECKING:
    FunctionWrapper = wrapt.FunctionWrapper[..., Any]
    BoundFunctionWrapper = wrapt.BoundFunctionWrapper[..., Any]
else:  # wrapt below 2.2 has no types to subscript
    FunctionWrapper, BoundFunctionWrapper = wrapt.FunctionWrapper, wrapt.BoundFunctionWrapper


class BoundDecoratedFunction(BoundFunctionWrapper):
    """A decorated method, bound to its instance or class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (self._self_instance, self.__wrapped__.__name__)


class DecoratedFunction(FunctionWrapper):
    """A function, method, class method or static method with a call of its own, which subclasses define.

    Args:
        wrapped: the plain function.
        *settings: of the decorator; they go along when the function is copied or pickled.
    """

    __bound_function_wrapper__ = BoundDecoratedFunction

    def __init__(self, wrapped: Callable[..., Any], *settings: Any) -> None:
        super().__init__(wrapped, partial(self._self_call, *settings))
        self._self_settings = settings

    @staticmethod
    def _self_call(*settings_wrapped_instance_args_kwargs: Any) -> Any:
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.__module__ != "__main__" and find_by_name(self.__module__, self.__qualname__) is self:
            return self.__qualname__  # pickle takes a string for a name in the module
        return type(self), (self.__wrapped__, *self._self_settings)

    def is_in_class_method(self) -> bool:
        """Return whether a class holds this function under ``@classmethod``."""
        owner = find_by_name(self.__module__, self.__qualname__.rpartition(".")[0])
        held = vars(owner).get(self.__name__) if isinstance(owner, type) else None
        return isinstance(held, classmethod) and held.__func__ is self

    def __copy__(self) -> Any:
        return type(self)(self.__wrapped__, *self._self_settings)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__copy__()


def find_by_name(module: str, qualname: str) -> object:
    """Return what an imported module holds under a name, or ``None``."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found
