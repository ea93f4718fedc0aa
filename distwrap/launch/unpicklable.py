"""Find the object that cannot be pickled, and the path to it."""

import types
from collections.abc import Callable, Iterator, Sequence

_DEPTH = 8  # how far down the search goes


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
