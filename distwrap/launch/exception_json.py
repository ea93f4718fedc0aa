"""Exceptions as JSON, for the callers on other nodes, who raise them in their own type where they know that type.

Nothing is unpickled, and nothing is imported: only a class that this process has loaded already, and that is an
exception, is called, with plain arguments.
"""

import json
import socket
import time
from contextlib import suppress
from typing import Any

from distwrap.decorated import find_by_name
from distwrap.errors import WorkerError

_ATTRIBUTES = ("rank", "host", "exitcode", "signal")


def to_json(error: BaseException) -> dict[str, Any]:
    """Return what `from_json` needs of an exception, with what is known of the rank that raised it."""
    cause = error.__cause__
    plain: list[Any] | None = None
    with suppress(TypeError, ValueError):
        plain = json.loads(json.dumps(error.args))
    return {
        **{name: getattr(error, name, None) for name in _ATTRIBUTES},
        "host": getattr(error, "host", None) or socket.gethostname(),
        "type": [type(error).__module__, type(error).__qualname__],
        "args": plain if plain == list(error.args) else None,
        "summary": f"{type(error).__name__}: {error}",
        "traceback": str(cause).partition("raised:\n\n")[2] if cause is not None else "",
        "time": time.time(),
    }


def from_json(message: dict[str, Any]) -> BaseException:
    """Return the exception of which another node tells; a `WorkerError` with its words where that cannot be.

    Example:
        >>> from_json(to_json(KeyError("weights")))
        KeyError('weights')
    """
    module, name = message["type"]
    found = find_by_name(module, name)
    error: BaseException | None = None
    if isinstance(found, type) and issubclass(found, Exception) and message["args"] is not None:
        with suppress(Exception):
            error = found(*message["args"])
    if error is None:
        error = WorkerError(f"on {message['host']}: {message['summary']}")
    for name in _ATTRIBUTES:
        with suppress(AttributeError, TypeError):
            setattr(error, name, message[name])
    return error
