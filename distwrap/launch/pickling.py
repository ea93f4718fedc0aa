"""Our pickler: functions by value where cloudpickle is installed, and the caller's own classes and objects recognised.

Three things differ from cloudpickle's. A decorated function goes with its decorator. A tensor on an accelerator comes
out on the CPU. And on the way home a class that the caller knows comes out as the caller's own class, unchanged.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import io
import pickle
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import wrapt

from distwrap.decorated import find_by_name


def by_value() -> bool:
    """Say whether functions can go by value."""
    return importlib.util.find_spec("cloudpickle") is not None


def dumps(obj: object, known: Sequence[tuple[object, ...]] = (), *, to_caller: bool = False) -> bytes:
    """Pickle by value where cloudpickle is installed, by reference else."""
    buffer = io.BytesIO()
    _pickler_class()(buffer, known, to_caller).dump(obj)
    return buffer.getvalue()


def loads(data: bytes, known: Sequence[object] = ()) -> Any:
    """Undo `dumps`, given the other side's `known` objects in the same order."""
    return _Unpickler(io.BytesIO(data), known).load()


def by_name(module: str, qualname: str) -> object:
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
    return by_name(module, qualname)


def _goes_by_value(function: Callable[..., Any]) -> bool:
    """Say whether cloudpickle takes the function along; without it those of ``__main__`` go by name like any other."""
    return function.__module__ == "__main__" and by_value()


class _Hooks:
    """What our pickler does beside the standard one."""

    _known: dict[int, int]
    _to_caller: bool

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
            if find_by_name(module, qualname) is not obj and by_name(module, qualname) is obj:
                return _load_by_name, (module, qualname)
        if self._to_caller and isinstance(obj, type):
            reduced = _class_of_the_caller(obj)
            if reduced is not None:
                return reduced
        inherited = getattr(super(), "reducer_override", None)
        return NotImplemented if inherited is None else inherited(obj)


def _class_of_the_caller(cls: type) -> tuple[Any, ...] | None:
    """Find words by which the caller recognises a class of its own, so that ``except MyError`` works there."""
    if find_by_name(cls.__module__, cls.__qualname__) is cls:
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
    found = find_by_name(module, qualname)
    if found is None:
        raise AttributeError(f"{module} has no {qualname}")
    return found


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
            def __init__(self, file: io.BytesIO, known: Sequence[tuple[object, ...]], to_caller: bool) -> None:
                super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
                self._known = {id(alias): index for index, aliases in enumerate(known) for alias in aliases}
                self._to_caller = to_caller

        _pickler = Pickler
    return _pickler
