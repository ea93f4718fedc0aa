"""Outcomes of ranks: reported by the rank or its caller, written as JSON for other nodes, raised in the caller."""

import json
import os
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from distwrap import tracebacks
from distwrap.decorated import find_by_name
from distwrap.errors import CollectiveError, WorkerDiedError, WorkerError, WorkerTraceback
from distwrap.group import failures
from distwrap.launch import transport
from distwrap.launch.pickling import make_error
from distwrap.launch.processes import describe_exit
from distwrap.wording import named_ranks, print_notice

SETTLE_SECONDS = 0.3  # after a failure, for the outcomes of other ranks that failed too
CAUSE_SECONDS = 4.0  # after a secondary failure, for the failure itself

_ATTRIBUTES = ("rank", "host", "exitcode", "signal")  # of an exception, told with it


@dataclass(frozen=True)
class Outcome:
    """End of a rank. The values are plain, so that reading one cannot fail.

    Attributes:
        pid: process id; 0 where it is unknown, as that of a rank on another node.
        time: seconds since the epoch, to find the first of several failures.
        value: the pickled result, or ``None``.
        error: the pickled exception, or ``None`` after success and where the exception cannot be pickled.
        summary: the exception in one line; empty after success.
        traceback: the exception in full; empty after success and where the rank ended without a report.
        is_secondary: whether the rank failed only because it had lost another rank.
    """

    rank: int
    host: str
    pid: int
    time: float
    value: bytes | None = None
    error: bytes | None = None
    summary: str = ""
    traceback: str = ""
    is_secondary: bool = False

    @property
    def failed(self) -> bool:
        """Whether the rank failed."""
        return bool(self.summary)


@dataclass(frozen=True)
class Exit:
    """Value of a rank that left the function by ``sys.exit(0)``, which counts as a return."""


def success(rank: int, value: bytes | None) -> Outcome:
    """Return the outcome of this process as a rank that has done its work."""
    return Outcome(rank, socket.gethostname(), os.getpid(), time.time(), value)


def failure(rank: int, error: BaseException) -> Outcome:
    """Return the outcome of this process as a rank that has raised an exception."""
    outcome = of_error(rank, socket.gethostname(), os.getpid(), error, tracebacks.as_text(error))
    return replace(outcome, is_secondary=failures.is_secondary(error))


def death(rank: int, pid: int, exitcode: int | None, oom_kills: int | None = None, last_seen: str = "") -> Outcome:
    """Return the outcome of a rank on this node whose process died without reporting one."""
    host = socket.gethostname()
    error = WorkerDiedError(
        f"rank {rank} on {host} (pid {pid}) died without raising an exception: "
        f"{describe_exit(exitcode, oom_kills)}{last_seen}. Look at what it printed last.",
        rank=rank,
        host=host,
        exitcode=exitcode,
        signal=-exitcode if exitcode is not None and exitcode < 0 else None,
    )
    return of_error(rank, host, pid, error)


def of_error(rank: int, host: str, pid: int, error: BaseException, trace: str = "", when: float = 0.0) -> Outcome:
    """Return the outcome of any rank that failed with an exception, by default now."""
    words = failures.in_words(error)
    return Outcome(rank, host, pid, when or time.time(), None, transport.pack_error(error), words, trace)


def patience_after(failed: Sequence[Outcome]) -> float:
    """Return the seconds to wait, after a failure, for outcomes that may explain it better."""
    return CAUSE_SECONDS if first_cause(failed).is_secondary else SETTLE_SECONDS


def raise_if_failed(outcomes: Iterable[Outcome]) -> None:
    """Raise the first cause if a rank failed, as `raise_failure` does."""
    known = list(outcomes)
    if failed := [outcome for outcome in known if outcome.failed]:
        raise_failure(failed, [outcome.rank for outcome in known if not outcome.failed])


def write_whole(path: Path, data: bytes) -> None:
    """Write a file in one step, so that no reader finds half of it."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    part.replace(path)


def first_cause(failed: Sequence[Outcome]) -> Outcome:
    """Return the failure that explains the others: the earliest that is not secondary.

    A rank that dies silently is noticed after its peers' complaints, so a secondary failure never wins over it.
    """
    return min(failed, key=lambda outcome: (outcome.is_secondary, outcome.time))


def raise_failure(failed: Sequence[Outcome], finished: Sequence[int] = ()) -> NoReturn:
    """Raise the first cause of the failures in its own type, caused by a `WorkerTraceback`.

    Args:
        failed: outcomes of the ranks that failed.
        finished: ranks that had left the function before.

    Raises:
        CollectiveError: a rank waited in a collective for ranks that had left.
        WorkerError: the exception cannot be pickled.
    """
    cause = first_cause(failed)
    where = f"rank {cause.rank} on {cause.host}" + (f" (pid {cause.pid})" if cause.pid else "")
    others = {outcome.rank for outcome in failed} - {cause.rank}
    also = f"\n({named_ranks(others)} failed afterwards)" if others else ""
    known: dict[str, Any] = {"rank": cause.rank, "host": cause.host, "exitcode": 1, "signal": None}
    remote = WorkerTraceback(f"{where} raised:\n\n{cause.traceback}{also}", **known) if cause.traceback else None
    if remote is not None:
        remote.is_secondary = cause.is_secondary
    if finished and cause.is_secondary and failures.NAMED not in cause.summary:
        raise CollectiveError(
            f"{where} waited in a collective for {named_ranks(finished)}, which had left the function already. "
            "Every rank must call the same collectives: look for a branch, a break, a sys.exit or a loop that "
            "differs between ranks."
        ) from remote
    error: BaseException | None = None
    if cause.error is not None:
        with suppress(Exception):
            error = transport.unpack_result(cause.error)
    if error is None:
        words = (
            f"{where} raised {cause.summary} (this exception cannot be pickled, so that it cannot be raised "
            "here with its own type)"
        )
        raise WorkerError(words, **known) from remote
    for name, value in known.items():
        if not hasattr(error, name):
            with suppress(AttributeError, TypeError):
                setattr(error, name, value)
    if isinstance(error, SystemExit) and error.code not in (None, 0):
        print_notice(f"{where} called sys.exit({error.code!r})")
    if remote is None and also:
        error.args = (f"{error}{also}",)
    raise error from remote


def to_json(error: BaseException) -> dict[str, Any]:
    """Return an exception as JSON for `from_json`, with what is known of the rank that raised it.

    Callers on other nodes raise it in its own type where they know that type. Nothing is unpickled there, and nothing
    is imported or called: a class that is loaded already, and that is an exception, gets plain arguments and
    attributes.
    """
    cause, args = error.__cause__, list(error.args)
    return {
        **{name: getattr(error, name, None) for name in _ATTRIBUTES},
        "host": getattr(error, "host", None) or socket.gethostname(),
        "type": [type(error).__module__, type(error).__qualname__],
        "args": args if _is_plain(args) else None,
        "attributes": {name: value for name, value in vars(error).items() if _is_plain(value)},
        "summary": f"{type(error).__name__}: {error}",
        "is_secondary": getattr(cause, "is_secondary", False),
        "traceback": str(cause).partition("raised:\n\n")[2] if cause is not None else "",
        "time": time.time(),
    }


def _is_plain(value: Any) -> bool:
    """Return whether JSON gives a value back unchanged."""
    with suppress(TypeError, ValueError):
        return bool(json.loads(json.dumps(value)) == value)
    return False


def from_json(message: dict[str, Any]) -> BaseException:
    """Return the exception that another node has written as JSON, or a `WorkerError` with its words.

    Example:
        >>> from_json(to_json(KeyError("weights")))
        KeyError('weights')
    """
    module, name = message["type"]
    found = find_by_name(module, name)
    error: BaseException | None = None
    if isinstance(found, type) and issubclass(found, Exception) and message["args"] is not None:
        with suppress(Exception):
            error = make_error(found, message["args"])
            vars(error).update(message["attributes"])
    if error is None:
        error = WorkerError(f"on {message['host']}: {message['summary']}")
    for name in _ATTRIBUTES:
        with suppress(AttributeError, TypeError):
            setattr(error, name, message[name])
    return error
