"""Carry a function and its arguments to the ranks, and a result or an exception back.

Pickles go only between the caller and processes it started, over sockets that nobody else holds. The function goes
*by value* where cloudpickle is installed, so lambdas, closures and functions of ``__main__`` need no import on the
other side; *by reference* (module and name) otherwise.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import wrapt

from distwrap.errors import SerializationError

_DEPTH = 8  # how far down the search for an unpicklable object goes


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


def by_value() -> bool:
    """Say whether functions can go by value."""
    return importlib.util.find_spec("cloudpickle") is not None


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
        return dumps(obj, known, homeward=True)

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
    return _Unpickler(io.BytesIO(data), known).load()


def pack_error(error: BaseException) -> bytes | None:
    """Pickle an exception, or return ``None`` where it would not come out on the other side as it went in."""
    try:
        data = dumps(error, homeward=True)
        return data if type(pickle.loads(data)) is type(error) else None
    except Exception:  # noqa: BLE001 - an exception may break in any way; its traceback goes along as text
        return None


def dumps(obj: object, known: Sequence[tuple[object, ...]] = (), *, homeward: bool = False) -> bytes:
    """Pickle by value where cloudpickle is installed, by reference else."""
    buffer = io.BytesIO()
    _pickler_class()(buffer, known, homeward).dump(obj)
    return buffer.getvalue()


def find_unpicklable(obj: object, dump: Callable[[object], bytes], names: Sequence[str]) -> tuple[str, object]:
    """Find the deepest object that cannot be pickled, and the path to it in words.

    Args:
        obj: what cannot be pickled.
        dump: what pickles.
        names: words for the items of `obj`, where it is a tuple.
    """
    path, seen = "", {id(obj)}
    for depth in range(_DEPTH):
        for step, child in _children(obj, names if depth == 0 else ()):
            if id(child) in seen or _dumps_well(child, dump):
                continue
            seen.add(id(child))
            path, obj = (f"{step} of {path}" if path else step), child
            break
        else:
            break
    return path, obj


def _children(obj: object, names: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Yield what an object holds, each with a word for the way to it."""
    if isinstance(obj, types.MethodType):
        yield "the object", obj.__self__
        obj = obj.__func__
    if isinstance(obj, types.FunctionType):
        code = obj.__code__
        for name, cell in zip(code.co_freevars, obj.__closure__ or (), strict=False):
            try:
                yield f"closure variable {name!r}", cell.cell_contents
            except ValueError:
                continue
        for name in code.co_names:
            if name in obj.__globals__ and not isinstance(obj.__globals__[name], types.ModuleType):
                yield f"global {name!r}", obj.__globals__[name]
        for index, default in enumerate(obj.__defaults__ or ()):
            yield f"default {index}", default
    elif isinstance(obj, dict):
        for key, value in obj.items():
            yield f"item {key!r}", value
    elif isinstance(obj, (list, tuple)):
        for index, value in enumerate(obj):
            yield (names[index] if index < len(names) else f"item {index}"), value
    elif isinstance(obj, (set, frozenset)):
        for value in obj:
            yield "an element", value
    elif isinstance(getattr(obj, "__dict__", None), dict) and not isinstance(obj, (type, types.ModuleType)):
        for key, value in vars(obj).items():
            yield f"attribute {key!r}", value


def _dumps_well(obj: object, dump: Callable[[object], bytes]) -> bool:
    try:
        dump(obj)
    except Exception:  # noqa: BLE001 - whatever is raised, it cannot be pickled
        return False
    return True


def _check_reference(function: Callable[..., Any]) -> None:
    """Refuse a function that another process could not find by its name."""
    function = getattr(function, "__func__", function)
    if (
        isinstance(function, types.FunctionType)
        and _by_name(function.__module__, function.__qualname__) is not function
    ):
        code = function.__code__
        raise SerializationError(
            f"{_name(function)} (line {code.co_firstlineno} of {code.co_filename}) cannot be sent to the ranks by its "
            f"name: it is a lambda, a nested function, or hidden behind another decorator. Install cloudpickle "
            f"(pip install 'distwrap[notebook]') to send it by value, move it to the top level of a module, or use "
            f"launcher='fork' or 'script'."
        )


def _by_name(module: str, qualname: str) -> object:
    """Find what is decorated under a name: unwrap until nothing is wrapped any more."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    found = getattr(found, "__func__", found)
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
        found = getattr(found, "__func__", found)
    return found


def _load_by_name(module: str, qualname: str) -> object:
    importlib.import_module(module)
    return _by_name(module, qualname)


def _name(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__qualname__', type(function).__qualname__)}()"


def _goes_by_value(function: Callable[..., Any]) -> bool:
    """Say whether cloudpickle takes the function along; without it those of ``__main__`` go by name like any other."""
    return function.__module__ == "__main__" and by_value()


class _Hooks:
    """What our pickler does beside the standard one."""

    _known: dict[int, int]
    _homeward: bool

    def persistent_id(self, obj: object) -> int | None:
        return self._known.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
            return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        if isinstance(obj, wrapt.FunctionWrapper):
            # cloudpickle would take the proxy for the function inside it.
            return obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if type(obj) is types.FunctionType and obj.__module__ is not None and not _goes_by_value(obj):
            # A decorated function is no longer what its module holds under its name; pickle would refuse it.
            module, qualname = obj.__module__, obj.__qualname__
            if _by_plain_name(module, qualname) is not obj and _by_name(module, qualname) is obj:
                return _load_by_name, (module, qualname)
        if self._homeward and isinstance(obj, type):
            reduced = _class_of_the_caller(obj)
            if reduced is not None:
                return reduced
        inherited = getattr(super(), "reducer_override", None)
        return NotImplemented if inherited is None else inherited(obj)


def _class_of_the_caller(cls: type) -> tuple[Any, ...] | None:
    """Find words by which the caller recognises a class of its own, so that ``except MyError`` works there."""
    if _by_plain_name(cls.__module__, cls.__qualname__) is cls:
        return (_load_plain_name, (cls.__module__, cls.__qualname__)) if cls.__module__ == "__main__" else None
    if by_value():
        from cloudpickle import cloudpickle

        tracker = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(cls)
        if tracker is not None:
            return _load_tracked_class, (tracker,)
    if _forked and not any(obj is cls for obj in gc.get_objects()):
        return _load_class_at, (id(cls), cls.__qualname__)
    return None


_forked = False


def mark_as_forked() -> None:
    """Note that what exists now exists in the caller too, at the same address."""
    global _forked
    _forked = True
    gc.freeze()  # later objects alone are listed by gc.get_objects() from now on


def _load_class_at(address: int, qualname: str) -> type:
    waiting: list[type] = [object]
    seen: set[int] = set()
    while waiting:
        cls: type
        for cls in type.__subclasses__(waiting.pop()):
            if id(cls) == address and cls.__qualname__ == qualname:
                return cls
            if id(cls) not in seen:
                seen.add(id(cls))
                waiting.append(cls)
    raise AttributeError(f"the caller has no class {qualname}")


def _load_tracked_class(tracker: str) -> type:
    from cloudpickle import cloudpickle

    return cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[tracker]  # type: ignore[no-any-return]


def _load_plain_name(module: str, qualname: str) -> object:
    found = _by_plain_name(module, qualname)
    if found is None:
        raise AttributeError(f"{module} has no {qualname}")
    return found


def _by_plain_name(module: str, qualname: str) -> object:
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


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


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, known: Sequence[object]) -> None:
        super().__init__(file)
        self._objects = known

    def persistent_load(self, pid: Any) -> object:
        return self._objects[pid]


_pickler: type[Any] | None = None


def _pickler_class() -> type[Any]:
    global _pickler
    if _pickler is None:
        base: type[Any] = pickle.Pickler
        if by_value():
            import cloudpickle

            base = cloudpickle.Pickler

        class Pickler(_Hooks, base):  # type: ignore[misc]
            def __init__(self, file: io.BytesIO, known: Sequence[tuple[object, ...]], homeward: bool) -> None:
                super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
                self._known = {id(alias): index for index, aliases in enumerate(known) for alias in aliases}
                self._homeward = homeward

        _pickler = Pickler
    return _pickler
