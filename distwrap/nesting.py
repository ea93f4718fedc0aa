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
    """
    changed = change(value, path)
    if changed is not value or not isinstance(value, (list, tuple, dict)):
        return changed
    if isinstance(value, dict):
        pairs = {key: rebuilt(item, change, (*path, key)) for key, item in value.items()}
        if all(map(is_, pairs.values(), value.values())):
            return value
        copied = copy.copy(value)
        for key, item in pairs.items():  # since update() of a Counter adds
            copied[key] = item
        return copied
    items = [rebuilt(item, change, (*path, index)) for index, item in enumerate(value)]
    if all(map(is_, items, value)):
        return value
    if isinstance(value, list):
        result = copy.copy(value)  # a subclass may be constructed in another way
        result[:] = items
        return result
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
