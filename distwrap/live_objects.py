"""Objects of this process, by their class, those of the process that it was forked from too."""

import gc
from typing import Any, TypeVar

T = TypeVar("T")

_is_forked = False
_first: list[Any] | None = None  # after those that the fork server has frozen, none of which is a user's
_of_caller: set[int] | None = None  # ids of the classes of before, once the collector knows all objects again


def mark_as_forked() -> None:
    """Note that all objects of this moment exist in the caller too, at the same address."""
    global _is_forked
    _is_forked = True
    gc.freeze()  # gc.get_objects() lists only later objects from now on


def mark_as_served() -> None:
    """Note that all objects of this moment are the fork server's, which has frozen them."""
    global _first
    _first = []


def is_callers(cls: type) -> bool:
    """Return whether a class was there when this process was forked from the caller's."""
    if _of_caller is not None:
        return id(cls) in _of_caller
    return _is_forked and not any(obj is cls for obj in gc.get_objects())


def instances(*kinds: type[T]) -> list[T]:
    """Return the instances of some classes, for which it looks at all objects but the fork server's.

    Example:
        >>> class Seldom: ...
        >>> one = Seldom()
        >>> instances(Seldom) == [one]
        True
    """
    global _of_caller
    if _is_frozen():
        later = _classes() if _is_forked else set()
        gc.unfreeze()
        if _is_forked:
            _of_caller = _classes() - later
    return [obj for obj in gc.get_objects() if issubclass(type(obj), kinds)]


def _is_frozen() -> bool:
    """Return whether the collector leaves objects out that are not the fork server's; to count those takes long."""
    return gc.get_freeze_count() > 0 if _first is None else not any(obj is _first for obj in gc.get_objects())


def _classes() -> set[int]:
    found: list[Any] = gc.get_objects()
    return {id(obj) for obj in found if issubclass(type(obj), type)}
