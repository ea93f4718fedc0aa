"""Carry a function and its arguments to the ranks, and a result or an exception back.

Pickles go only between the caller and processes it started, over sockets that nobody else holds. The function goes
*by value* where cloudpickle is installed, so lambdas, closures and functions of ``__main__`` need no import on the
other side; *by reference* (module and name) otherwise.
"""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distwrap.errors import SerializationError
from distwrap.launch.pickling import by_name, by_value, dumps, loads
from distwrap.launch.unpicklable import find_unpicklable


@dataclass(frozen=True)
class Outcome:
    """How a rank ended, as it says itself. Plain values, so that reading one cannot fail.

    Attributes:
        time: seconds since the epoch, to find the first of several failures.
        value: the pickled result, or ``None``.
        error: the pickled exception, or ``None`` where it succeeded or its exception cannot be pickled.
        summary: the exception in one line, empty after success.
        traceback: the exception in full, empty after success.
    """

    rank: int
    host: str
    pid: int
    time: float
    value: bytes | None = None
    error: bytes | None = None
    summary: str = ""
    traceback: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.summary)


def pack(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call.

    Raises:
        SerializationError: names the path of the object that cannot be pickled, and the ways out.
    """
    if not by_value():
        _check_reference(function)
    call = (function, args, kwargs)
    try:
        return dumps(call)
    except Exception as error:
        path, culprit = find_unpicklable(call, dumps, ("the function", "the arguments", "the keyword arguments"))
        raise SerializationError(
            f"{_name(function)} cannot be sent to the ranks: {path} is a {type(culprit).__qualname__} that cannot be "
            f"pickled ({type(error).__name__}: {error}). Create it inside the function, or use launcher='fork' or "
            f"'script', which pickle nothing."
        ) from error


def unpack(data: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Undo `pack`, on the rank."""
    function, args, kwargs = pickle.loads(data)
    _adopt_main(function)
    return function, args, kwargs


def pack_result(value: object, what: str, known: Sequence[tuple[object, ...]] = ()) -> bytes:
    """Pickle a result on its way back: tensors on the CPU, classes of the caller as the caller's own.

    Args:
        value: the result.
        what: words for it, for the error.
        known: objects that the caller has too, each with its aliases here; they come out as the caller's own.

    Raises:
        SerializationError: names the path of the object that cannot be pickled.
    """

    def dump(obj: object) -> bytes:
        return dumps(obj, known, to_caller=True)

    try:
        return dump(value)
    except Exception as error:
        path, culprit = find_unpicklable(value, dump, ("the value",))
        raise SerializationError(
            f"{what} cannot be sent back to the caller: {path or 'it'} is a {type(culprit).__qualname__} that cannot "
            f"be pickled ({type(error).__name__}: {error}). Return plain values, tensors or state dicts."
        ) from error


def unpack_result(data: bytes, known: Sequence[object] = ()) -> Any:
    """Undo `pack_result`, in the caller."""
    return loads(data, known)


def pack_error(error: BaseException) -> bytes | None:
    """Pickle an exception, or return ``None`` where it would not come out on the other side as it went in."""
    try:
        data = dumps(error, to_caller=True)
        return data if type(pickle.loads(data)) is type(error) else None
    except Exception:  # noqa: BLE001 - an exception may break in any way; its traceback goes along as text
        return None


def _check_reference(function: Callable[..., Any]) -> None:
    """Refuse a function that another process could not find by its name."""
    function = getattr(function, "__func__", function)
    if isinstance(function, types.FunctionType) and by_name(function.__module__, function.__qualname__) is not function:
        code = function.__code__
        raise SerializationError(
            f"{_name(function)} (line {code.co_firstlineno} of {code.co_filename}) cannot be sent to the ranks by its "
            f"name: it is a lambda, a nested function, or hidden behind another decorator. Install cloudpickle "
            f"(pip install 'distwrap[notebook]') to send it by value, move it to the top level of a module, or use "
            f"launcher='fork' or 'script'."
        )


def _name(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__qualname__', type(function).__qualname__)}()"


def _adopt_main(function: Callable[..., Any]) -> None:
    """Give this rank's ``__main__`` the names that a function sent by value brought along.

    Then what is pickled by name on the rank (``torch.save(model)``, a loader's worker, a result) finds its classes.
    """
    function = getattr(function, "__func__", function)
    if isinstance(function, types.FunctionType) and function.__module__ == "__main__":
        main = sys.modules["__main__"].__dict__
        for name, value in function.__globals__.items():
            if not (name.startswith("__") and name.endswith("__")):
                main[name] = value
