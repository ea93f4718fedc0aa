"""An exception as another machine tells it: JSON, and made again in its own type where that type is known here.

Nothing is unpickled, and nothing is imported: only a class that this process has loaded already, and that is an
exception, is called, with plain arguments.
"""

from __future__ import annotations

import builtins
import json
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from distwrap.errors import WorkerError


def to_json(error: BaseException) -> dict[str, Any]:
    """Describe an exception for `from_json`, with what is known of the rank that raised it."""
    cause = error.__cause__
    return {
        "rank": getattr(error, "rank", None),
        "host": getattr(error, "host", None) or socket.gethostname(),
        "type": [type(error).__module__, type(error).__qualname__],
        "args": _plain(error.args),
        "summary": f"{type(error).__name__}: {error}",
        "traceback": str(cause).partition("raised:\n\n")[2] if cause is not None else "",
        "exitcode": getattr(error, "exitcode", None),
        "signal": getattr(error, "signal", None),
        "time": time.time(),
    }


def from_json(told: dict[str, Any]) -> BaseException:
    """Make the exception that another machine tells of; a `WorkerError` with its words where that cannot be.

    Example:
        >>> from_json(to_json(KeyError("weights")))
        KeyError('weights')
    """
    module, name = told["type"]
    found: Any = sys.modules.get(module) if module != "builtins" else builtins
    for part in name.split("."):
        found = getattr(found, part, None)
    error: BaseException | None = None
    if isinstance(found, type) and issubclass(found, Exception) and told["args"] is not None:
        with suppress(Exception):
            error = found(*told["args"])
    if error is None:
        error = WorkerError(f"on {told['host']}: {told['summary']}")
    for key in ("rank", "host", "exitcode", "signal"):
        with suppress(AttributeError, TypeError):
            setattr(error, key, told[key])
    return error


def _plain(args: tuple[Any, ...]) -> list[Any] | None:
    """The arguments of an exception, where they survive JSON as they are."""
    with suppress(TypeError, ValueError):
        if json.loads(json.dumps(args)) == list(args):
            return list(args)
    return None
