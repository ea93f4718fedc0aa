"""The pickler: functions by value where cloudpickle is installed, and the caller's own classes and objects recognised.

It differs from cloudpickle's in five things. A decorated function goes with its decorator, and code with its
source. A tensor on an accelerator comes out on the CPU. An exception comes out with its attributes, whatever its
class is called with. And on the way to the caller a class that the caller knows comes out as the caller's own class,
unchanged.
"""

import functools
import importlib
import importlib.util
import io
import pickle
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch
import wrapt

from distwrap._internals import packages as internals
from distwrap.decorated import find_by_name
from distwrap.places import CodeSource, learn, source_of


def by_value() -> bool:
    """Return whether functions can go by value."""
    return importlib.util.find_spec("cloudpickle") is not None


def dumps(obj: object, known: Sequence[tuple[object, ...]] = (), *, to_caller: bool = False) -> bytes:
    """Pickle by value where cloudpickle is installed, else by reference.

    Args:
        obj: object to pickle.
        known: objects that the other side has too, each with its aliases here; they come out as the other side's own.
        to_caller: whether the other side is the caller, whose classes come out as its own.
    """
    buffer = io.BytesIO()
    _pickler_class()(buffer, known, to_caller).dump(obj)
    return buffer.getvalue()


def loads(data: bytes, known: Sequence[object] = ()) -> Any:
    """Undo `dumps`, given the `known` objects of this side in the same order."""
    unpickler = _Unpickler(io.BytesIO(data))
    unpickler.known = known
    return unpickler.load()


class _Unpickler(pickle.Unpickler):
    known: Sequence[object] = ()

    def persistent_load(self, index: int) -> object:  # a method, since Python 3.13.0 refuses an attribute
        return self.known[index]


def find_decorated(module: str, qualname: str) -> object:
    """Return what is decorated under a name: the function inside all wrappers."""
    found: Any = find_by_name(module, qualname)
    while True:
        found = getattr(found, "__func__", found)
        if not hasattr(found, "__wrapped__"):
            return found
        found = found.__wrapped__


def _load_decorated(module: str, qualname: str) -> object:
    importlib.import_module(module)
    return find_decorated(module, qualname)


@functools.cache
def _pickler_class() -> type[Any]:
    base: type[Any] = pickle.Pickler
    if by_value():
        import cloudpickle

        base = cloudpickle.Pickler

    class Pickler(base):  # type: ignore[misc]
        def __init__(self, file: io.BytesIO, known: Sequence[tuple[object, ...]], to_caller: bool) -> None:
            super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
            self._known = {id(alias): index for index, aliases in enumerate(known) for alias in aliases}
            self._to_caller = to_caller
            self._source = functools.cache(source_of)  # one object for each file, which is pickled once

        def persistent_id(self, obj: object) -> int | None:
            return self._known.get(id(obj))

        def reducer_override(self, obj: Any) -> Any:
            reduced = _reduce(obj)
            if type(obj) is types.CodeType and by_value():
                return _with_source, (self._source(obj.co_filename), *self.dispatch_table[types.CodeType](obj))
            if reduced is None and self._to_caller and isinstance(obj, type):
                reduced = _reduce_class_of_caller(obj)
            if reduced is not None:
                return reduced
            inherited = getattr(super(), "reducer_override", None)
            return NotImplemented if inherited is None else inherited(obj)

    return Pickler


def _with_source(source: CodeSource, make: type[types.CodeType], parts: tuple[Any, ...]) -> types.CodeType:
    """Return code with the file in which it stands: cloudpickle 3.1.3 leaves it out, and tracebacks name no line."""
    learn(source)
    return make(*parts).replace(co_filename=source.file)


def _reduce(obj: Any) -> Any:
    """Return how an object is pickled where that differs from cloudpickle's way, else ``None``."""
    if isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
        obj = obj.detach().cpu().requires_grad_(obj.requires_grad)
        return obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if isinstance(obj, BaseException):
        return _reduce_error(obj)
    if type(obj) is not types.ModuleType and isinstance(obj, types.ModuleType) and obj is sys.modules.get(obj.__name__):
        # As torch.backends.cudnn, which pickle would take for any object.
        return importlib.import_module, (obj.__name__,)
    if isinstance(obj, wrapt.FunctionWrapper):  # cloudpickle would take the proxy for the function inside it
        return obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if type(obj) is not types.FunctionType or obj.__module__ is None or (obj.__module__ == "__main__" and by_value()):
        return None
    # A decorated function is no longer what its module holds under its name; pickle would refuse it.
    name = obj.__module__, obj.__qualname__
    return (_load_decorated, name) if find_by_name(*name) is not obj and find_decorated(*name) is obj else None


def _reduce_error(error: BaseException) -> Any:
    """Return how an exception is pickled, so that its class is not called with its words alone, else ``None``.

    pickle would call ``Error("code 3")`` for what was raised as ``Error(code=3)``.
    """
    cls = type(error)
    builtin = _builtin_base(cls)
    own_way = cls.__reduce_ex__ is not object.__reduce_ex__ or cls.__reduce__ is not builtin.__reduce__
    if cls is builtin or own_way:
        return None
    _, args, *state = list(error.__reduce__())
    return (make_error, (cls, args), *state)


def make_error(cls: type[BaseException], args: Sequence[Any]) -> BaseException:
    """Return an exception with the arguments that it holds; only its builtin base is called, and not its class."""
    builtin = _builtin_base(cls)
    error: BaseException = builtin.__new__(cls, *args)
    builtin.__init__(error, *args)
    return error


def _builtin_base(cls: type[BaseException]) -> Any:
    return next(base for base in cls.__mro__ if base.__module__ == "builtins")


def _reduce_class_of_caller(cls: type) -> Any:
    """Return how a class of the caller's own is pickled, so that ``except MyError`` works there, else ``None``."""
    if find_by_name(cls.__module__, cls.__qualname__) is cls:
        return cls.__qualname__ if cls.__module__ == "__main__" else None  # cloudpickle would send it by value
    tracker = internals.tracker_of(cls) if by_value() else None
    return None if tracker is None else (internals.class_of, (tracker,))
