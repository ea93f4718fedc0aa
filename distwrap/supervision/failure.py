"""Failure of a rank: one record for the pipe to its launcher, the ranks' store, and the callers on other nodes."""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

from distwrap.errors import DistwrapError


@dataclass(frozen=True)
class Failure:
    """Failure of a rank, described by the rank itself, or by who noticed it.

    Attributes:
        rank: the rank.
        host: the name of its host.
        pid: its process id; 0 where it is unknown.
        time: seconds since the epoch, to find the first of several failures.
        text: the exception as Python prints it.
        kind: module and name of the exception's class.
        traceback: the exception in full; empty where the rank ended without a report.
        secondary: whether the rank failed only because another one did.
        exitcode: of its process.
        signal: the number of the signal that ended it.
        arguments: of the exception, if JSON gives them back unchanged.
        attributes: of the exception, those that JSON gives back unchanged.
        pickled: the exception, for its launcher; never written as JSON.
    """

    rank: int
    host: str
    pid: int
    time: float
    text: str
    kind: tuple[str, str] = ("", "")
    traceback: str = ""
    secondary: bool = False
    exitcode: int | None = None
    signal: int | None = None
    arguments: list[Any] | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    pickled: bytes | None = field(default=None, repr=False)

    @classmethod
    def of(cls, error: BaseException, rank: int, **known: Any) -> Failure:
        """Return the failure of a rank with an exception, by default of this process and now."""
        kind, args = type(error), list(error.args)
        ours = error if isinstance(error, DistwrapError) else None  # another's attributes may be anything
        facts: dict[str, Any] = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
            "text": in_words(error),
            "kind": (kind.__module__, kind.__qualname__),
            "exitcode": getattr(ours, "exitcode", None),
            "signal": getattr(ours, "signal", None),
            "arguments": args if _is_plain(args) else None,
            "attributes": {name: value for name, value in vars(error).items() if _is_plain(value)},
        }
        return cls(rank, **{**facts, **known})

    @classmethod
    def in_own_words(cls, rank: int, text: str, **known: Any) -> Failure:
        """Return the failure of a rank that has raised nothing, by default of this process and now."""
        return cls(
            rank, **{"host": socket.gethostname(), "pid": os.getpid(), "time": time.time(), "text": text, **known}
        )

    @classmethod
    def from_json(cls, text: str) -> Failure:
        """Undo `to_json`.

        Raises:
            ValueError: the text is none of a failure.

        Example:
            >>> failure = Failure(1, "n1", 7, 0.0, "KeyError: 'x'", ("builtins", "KeyError"), arguments=["x"])
            >>> Failure.from_json(failure.to_json()) == failure
            True
        """
        try:
            told = json.loads(text)
            module, name = map(str, told.pop("kind"))
            told |= {"rank": int(told["rank"]), "time": float(told["time"]), "traceback": str(told["traceback"])}
            return cls(**{**told, "kind": (module, name), "pickled": None})
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"{text[:80]!r} is no failure of a rank") from error

    def to_json(self) -> str:
        """Return this for who unpickles nothing."""
        return json.dumps({each.name: getattr(self, each.name) for each in fields(self) if each.name != "pickled"})

    @property
    def where(self) -> str:
        """The rank, its host and its process, in words."""
        return f"rank {self.rank} on {self.host}" + (f" (pid {self.pid})" if self.pid else "")

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


def in_words(error: BaseException) -> str:
    """Return an exception as Python prints it: our own types with their module."""
    return "".join(traceback.format_exception_only(type(error), error)).strip() or type(error).__name__


def _is_plain(value: Any) -> bool:
    """Return whether JSON gives a value back unchanged."""
    with suppress(TypeError, ValueError, RecursionError):
        return bool(json.loads(json.dumps(value)) == value)
    return False
