"""Objects of this process, by their class, those of the process that it was forked from too."""

import gc
from typing import Any, TypeVar

T = TypeVar("T")

_first: list[Any] | None = None  # after those that the fork server has frozen, none of which is a user's


def mark_as_served() -> None:
    """Note that all objects of this moment are the fork server's, which has frozen them."""
    global _first
    _first = []


def instances(*kinds: type[T]) -> list[T]:
    """Return the instances of some classes, for which it looks at all objects but the fork server's.

    Example:
        >>> class Seldom: ...
        >>> one = Seldom()
        >>> instances(Seldom) == [one]
        True
    """
    found = gc.get_objects()
    if _is_frozen(found):
        gc.unfreeze()
        found = gc.get_objects()
    return [obj for obj in found if issubclass(type(obj), kinds)]


def _is_frozen(found: list[Any]) -> bool:
    """Return whether the collector leaves objects out that are not the fork server's; to count those takes long."""
    return gc.get_freeze_count() > 0 if _first is None else not any(obj is _first for obj in found)
