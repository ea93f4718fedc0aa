"""Pauses of Python's garbage collection."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Collect no garbage inside, unless nobody collects any outside either.

    Example:
        >>> with collection_paused():
        ...     gc.isenabled()
        False
        >>> gc.isenabled()
        True
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
