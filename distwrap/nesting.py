"""Lists, tuples and dicts in any nesting."""

import copy
from collections.abc import Callable
from operator import is_
from typing import Any


def rebuilt(value: Any, change: Callable[[Any, tuple[Any, ...]], Any], path: tuple[Any, ...] = ()) -> Any:
    """Return a nesting with some of its parts replaced; a container in which nothing is replaced is not copied.

    Args:
        value: lists, tuples and dicts in any nesting, and what is in them.
        change: gets each part, a container before what is in it, and the keys that lead to it. It returns the part
            itself to go on into it, or another that takes its place.
        path: the keys that lead to the value.

    Example:
        >>> rebuilt({"a": [1, 2]}, lambda part, path: "two" if path == ("a", 1) else part)
        {'a': [1, 'two']}

    Raises:
        RecursionError: a container holds itself, or they are nested deeper than Python can follow.
    """
    try:
        changed = change(value, path)
        if changed is not value or not isinstance(value, (list, tuple, dict)):
            return changed
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return refilled(value, [rebuilt(item, change, (*path, key)) for key, item in pairs])
    except RecursionError as error:
        if path:
            raise
        raise RecursionError(
            "a list, tuple or dict contains itself, or is nested deeper than Python can follow: give a flatter one."
        ) from error


def refilled(container: Any, items: list[Any]) -> Any:
    """Return a list, tuple or dict with other items, or the container itself where all of them are its own."""
    is_dict = isinstance(container, dict)
    if all(map(is_, items, container.values() if is_dict else container)):
        return container
    if is_dict:
        copied = copy.copy(container)
        for key, item in zip(container, items, strict=True):  # since update() of a Counter adds
            copied[key] = item
        return copied
    if isinstance(container, list):
        result = copy.copy(container)  # a subclass may be constructed in another way
        result[:] = items
        return result
    return type(container)(*items) if hasattr(container, "_fields") else type(container)(items)
