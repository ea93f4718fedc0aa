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
    found = gc.get_objects()
    if _is_frozen(found):
        later = {id(cls) for cls in _of_kinds(found, type)}
        gc.unfreeze()
        found = gc.get_objects()
        if _is_forked:
            _of_caller = {id(cls) for cls in _of_kinds(found, type)} - later
    return _of_kinds(found, *kinds)


def _is_frozen(found: list[Any]) -> bool:
    """Return whether the collector leaves objects out that are not the fork server's; to count those takes long."""
    return gc.get_freeze_count() > 0 if _first is None else not any(obj is _first for obj in found)


def _of_kinds(objects: list[Any], *kinds: type[T]) -> list[T]:
    return [obj for obj in objects if issubclass(type(obj), kinds)]
