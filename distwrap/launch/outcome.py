"""Outcomes of ranks: reported by a rank or by who noticed its end, collected by the launcher, raised by the caller."""

import math
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distwrap.decorated import find_by_name
from distwrap.errors import CollectiveError, WorkerDiedError, WorkerError, WorkerTraceback
from distwrap.group import failures
from distwrap.launch import transport
from distwrap.launch.pickling import make_error
from distwrap.launch.processes import describe_exit
from distwrap.network.waiting import Clock
from distwrap.supervision.failure import Failure
from distwrap.wording import named_ranks, print_notice

SETTLE_SECONDS = 0.3  # after a failure, for the outcomes of other ranks that failed too
CAUSE_SECONDS = 4.0  # after a secondary failure, for the failure itself


@dataclass(frozen=True)
class Outcome:
    """End of a rank.

    Attributes:
        rank: the rank.
        value: the pickled result, or ``None``.
        failure: ``None`` after success.
    """

    rank: int
    value: bytes | None = None
    failure: Failure | None = None

    @property
    def failed(self) -> bool:
        """Whether the rank failed."""
        return self.failure is not None


@dataclass(frozen=True)
class CleanExit:
    """Value of a rank that left the function by ``sys.exit(0)``, which counts as a return."""


def success(rank: int, value: bytes | None) -> Outcome:
    """Return the outcome of this process as a rank that has done its work."""
    return Outcome(rank, value)


def failure(rank: int, error: BaseException) -> Outcome:
    """Return the outcome of this process as a rank that has raised an exception."""
    told, pickled = failures.of_rank(rank, error), transport.pack_error(error)
    # What cannot be pickled would lack something where it is made again of its arguments.
    return Outcome(rank, failure=replace(told, pickled=pickled, arguments=told.arguments if pickled else None))


def died(error: WorkerDiedError, rank: int, pid: int = 0) -> Outcome:
    """Return the outcome of a rank whose process ended without reporting one, which the error describes."""
    told = Failure.of(error, rank, host=error.host or "?", pid=pid)
    return Outcome(rank, failure=replace(told, pickled=transport.pack_error(error)))


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
    return died(error, rank, pid)


def collect(
    receive: Callable[[float | None, Failure | None], Iterable[Outcome]],
    seconds: float | None = None,
    clock: Clock = time,
) -> list[Outcome]:
    """Return outcomes until no more come, or time is over; after a failure only those that may tell more of it.

    Args:
        receive: waits so many seconds for more outcomes, given the first cause that is known; returns none where no
            more come.
        seconds: time limit; ``None`` is none.
        clock: by which it waits.
    """
    outcomes: list[Outcome] = []
    deadline = math.inf if seconds is None else clock.monotonic() + seconds
    while True:
        left = None if deadline == math.inf else max(0.0, deadline - clock.monotonic())
        new = list(receive(left, first_cause(outcomes)))
        if not new:
            return outcomes
        outcomes += new
        cause = first_cause(outcomes)
        if cause is not None and first_cause(new) is not None:
            patience = CAUSE_SECONDS if cause.secondary else SETTLE_SECONDS
            deadline = min(deadline, clock.monotonic() + patience)


def first_cause(outcomes: Iterable[Outcome]) -> Failure | None:
    """Return the failure that explains the others: the earliest that is not secondary; ``None`` where no rank failed.

    A rank that dies silently is noticed after its peers' complaints, so a secondary failure never wins over it.
    """
    failed = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    return min(failed, key=lambda failure: (failure.secondary, failure.time), default=None)


def raise_if_failed(outcomes: Iterable[Outcome]) -> None:
    """Raise the first cause, if a rank failed, in its own type, caused by a `WorkerTraceback`.

    Raises:
        CollectiveError: a rank waited in a collective for ranks that had left.
        WorkerError: the exception cannot be raised here in its own type.
    """
    known = list(outcomes)
    cause = first_cause(known)
    if cause is None:
        return
    others = {outcome.rank for outcome in known if outcome.failure is not None} - {cause.rank}
    finished = [outcome.rank for outcome in known if outcome.failure is None]
    also = f"\n({named_ranks(others)} failed afterwards)" if others else ""
    facts: dict[str, Any] = {"rank": cause.rank, "host": cause.host, "exitcode": 1, "signal": None}
    remote: WorkerTraceback | None = None
    if cause.traceback:
        remote = WorkerTraceback(
            f"{cause.where} raised:\n\n{cause.traceback}{also}", secondary=cause.secondary, **facts
        )
        remote.text = cause.traceback
    if finished and cause.secondary and not cause.kind[0].startswith("distwrap."):
        raise CollectiveError(
            f"{cause.where} waited in a collective for {named_ranks(finished)}, which had left the function already. "
            "Every rank must call the same collectives: look for a branch, a break, a sys.exit or a loop that "
            "differs between ranks."
        ) from remote
    error = _made_again(cause)
    if error is None:
        why = "cannot be pickled, or is not known here, so that it cannot be raised with its own type"
        words = f"{cause.where} raised {cause.text} (this exception {why})"
        raise WorkerError(words, **facts) from remote
    for name, value in facts.items():
        if not hasattr(error, name):
            with suppress(AttributeError, TypeError):
                setattr(error, name, value)
    if isinstance(error, SystemExit) and error.code not in (None, 0):
        print_notice(f"{cause.where} called sys.exit({error.code!r})")
    if remote is None and also:
        error.args = (f"{error}{also}",)
    raise error from remote


def _made_again(failure: Failure) -> BaseException | None:
    """Return the exception of a failure; ``None`` where it cannot be had in its own type.

    Of what comes from another node nothing is unpickled, and nothing is imported or called: a class that is loaded
    already, and that is an exception, gets plain arguments and attributes.
    """
    error: BaseException | None = None
    with suppress(Exception):
        if failure.pickled is not None:
            error = transport.unpack_result(failure.pickled)
        kind = find_by_name(*failure.kind)
        if error is None and isinstance(kind, type) and issubclass(kind, Exception) and failure.arguments is not None:
            error = make_error(kind, failure.arguments)
            vars(error).update({**failure.attributes, "rank": failure.rank, "host": failure.host})
    return error


def write_whole(path: Path, data: bytes) -> None:
    """Write a file in one step, so that no reader finds half of it."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    part.replace(path)


class OutcomeFolder:
    """Folder in which ranks that another program has started leave their outcomes, each in a file.

    Args:
        path: the folder, which only this user may write.
        attempt: of ranks that are started again.
    """

    def __init__(self, path: str | Path, attempt: int = 0) -> None:
        self.path, self._begin = Path(path), f"outcome-{attempt}."

    @classmethod
    def of_last_attempt(cls, path: Path) -> "OutcomeFolder":
        """Return the outcomes of the last attempt of which there are any."""
        attempts = [int(name.split("-")[1].split(".")[0]) for name in os.listdir(path) if name.startswith("outcome-")]
        return cls(path, max(attempts, default=0))

    def put(self, outcome: Outcome, about: object = None) -> None:
        """Leave an outcome, and more about its rank."""
        write_whole(self.path / f"{self._begin}{outcome.rank:06}", pickle.dumps((outcome, about)))

    def read(self) -> list[tuple[Outcome, Any]]:
        """Return the outcomes that are there, in rank order, each with what else its rank has left."""
        names = sorted(name for name in os.listdir(self.path) if name.startswith(self._begin))
        return [pickle.loads((self.path / name).read_bytes()) for name in names]
