"""Carry a function and its arguments to the ranks, and a result or an exception back.

Pickles go only between the caller and processes that it started, over sockets that nobody else holds. The function goes
*by value* where cloudpickle is installed, so lambdas, closures and functions of ``__main__`` need no import on the
other side; *by reference* (module and name) otherwise.
"""

import pickle
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from distwrap.errors import OptionError, SerializationError
from distwrap.launch.pickling import by_value, dumps, find_decorated, loads
from distwrap.launch.task import Task
from distwrap.places import place
from distwrap.registry import REGISTRIES

_DEPTH = 8  # how far down an object that cannot be pickled is looked for


def pack(task: Task) -> bytes:
    """Pickle a call and its options.

    Raises:
        SerializationError: names the path of the object that cannot be pickled, and the ways out.
    """
    if not by_value():
        _check_reference(task.name, task.function)
    return _dump(
        (task.function, task.args, task.kwargs, task.options, [_sendable(each.registered()) for each in REGISTRIES]),
        dumps,
        ("the function", "the arguments", "the keyword arguments", "the options", "the registered names"),
        f"{task.name} cannot be sent to the ranks",
        "Create it inside the function, or use launcher='fork' or 'script', which pickle nothing.",
    )


def unpack(data: bytes) -> Task:
    """Undo `pack` on the rank, and take over the names that the caller has registered."""
    *parts, registered = pickle.loads(data)
    for registry, rows in zip(REGISTRIES, registered, strict=True):
        registry.adopt(rows)
    task = Task(*parts)
    _adopt_main(task.function)
    return task


class NotSent(NamedTuple):
    """Factory in place of one that a process has registered and that cannot be sent to its ranks."""

    name: str
    why: str

    def __call__(self, **_: object) -> NoReturn:
        raise OptionError(
            f"{self.name!r} was registered in the caller, and its factory cannot be sent to the ranks ({self.why}). "
            f"Define it at the top level of a module, or use launcher='fork' or 'script', which send nothing."
        )


def _sendable(rows: dict[str, Any]) -> dict[str, Any]:
    """Return rows of a registry, with a factory that explains itself for each that cannot be pickled."""
    sent = {}
    for name, row in rows.items():
        try:
            dumps(row)
            sent[name] = row
        except Exception as error:  # noqa: BLE001 - whatever is raised, the call may not need this one
            sent[name] = row._replace(factory=NotSent(name, f"{type(error).__name__}: {error}"), defaults={})
    return sent


def pack_result(value: object, what: str, known: Sequence[tuple[object, ...]] = ()) -> bytes:
    """Pickle a result for the caller: tensors on the CPU, classes of the caller as the caller's own.

    Args:
        value: the result.
        what: name of the result, for the error.
        known: objects that the caller has too, each with its aliases here; they come out as the caller's own.

    Raises:
        SerializationError: names the path of the object that cannot be pickled.
    """
    return _dump(
        value,
        lambda obj: dumps(obj, known, to_caller=True),
        ("the value",),
        f"{what} cannot be sent back to the caller",
        "Return plain values, tensors or state dicts.",
    )


unpack_result = loads


def pack_error(error: BaseException) -> bytes | None:
    """Pickle an exception, or return ``None`` where it would not come out on the other side as it went in."""
    try:
        data = dumps(error, to_caller=True)
        return data if type(pickle.loads(data)) is type(error) else None
    except Exception:  # noqa: BLE001 - an exception may break in any way; its traceback goes along as text
        return None


def _dump(obj: object, dump: Callable[[object], bytes], names: Sequence[str], problem: str, advice: str) -> bytes:
    try:
        return dump(obj)
    except Exception as error:
        path, culprit = find_unpicklable(obj, dump, names)
        raise SerializationError(
            f"{problem}: {path or 'it'} is a {type(culprit).__qualname__} that cannot be pickled "
            f"({type(error).__name__}: {error}). {advice}"
        ) from error


def _check_reference(name: str, function: Callable[..., Any]) -> None:
    """Refuse a function that another process could not find by its name.

    Raises:
        SerializationError: it could not.
    """
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType):
        return
    if find_decorated(function.__module__, function.__qualname__) is not function:
        code = function.__code__
        raise SerializationError(
            f"{name} ({place(code.co_filename, code.co_firstlineno)}) cannot be sent to the ranks by its "
            f"name: it is a lambda, a nested function, or hidden behind another decorator. Install cloudpickle "
            f"(pip install 'distwrap[notebook]') to send it by value, move it to the top level of a module, or use "
            f"launcher='fork' or 'script'."
        )


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


def find_unpicklable(
    obj: object, dump: Callable[[object], bytes], names: Sequence[str] = (), above: frozenset[int] = frozenset()
) -> tuple[str, object]:
    """Return the path to the deepest object that cannot be pickled, in words, and the object.

    Args:
        obj: object that cannot be pickled.
        dump: the function that pickles.
        names: words for the items of `obj`, where it is a tuple.
        above: the objects that hold `obj`, by their ``id``.
    """
    above |= {id(obj)}
    for step, child in _children(obj, names) if len(above) <= _DEPTH else ():
        if id(child) not in above and not _can_dump(child, dump):
            path, culprit = find_unpicklable(child, dump, (), above)
            return f"{path} of {step}" if path else step, culprit
    return "", obj


def _children(obj: object, names: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Yield the objects that an object holds, each with words for the step to it."""
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


def _can_dump(obj: object, dump: Callable[[object], bytes]) -> bool:
    try:
        dump(obj)
    except Exception:  # noqa: BLE001 - whatever is raised, it cannot be pickled
        return False
    return True
