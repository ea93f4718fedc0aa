"""Wait for the ranks, find what failed first, and leave none behind."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import NoReturn

from distwrap.errors import CollectiveError, WorkerDiedError, WorkerError, WorkerTimeoutError, WorkerTraceback
from distwrap.launch import transport
from distwrap.launch.processes import Process, kill
from distwrap.launch.transport import Outcome

SETTLE_SECONDS = 0.3  # after a failure, for the other ranks' accounts of it
EXIT_SECONDS = 5.0  # for a rank that has reported to end by itself
GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL

# What torch.distributed says on a rank whose peer is gone: an effect, not the cause.
_ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "Socket Timeout",
    "connectFullMesh",
    "NCCL",
    "remote process exited",
    "Failed to recv",
)


@dataclass(frozen=True)
class Death:
    """The end of a rank that said nothing."""

    rank: int
    pid: int
    exitcode: int | None
    time: float


def supervise(
    processes: Sequence[Process], *, seconds: float | None = None, rank_zero_is_done: threading.Event | None = None
) -> list[Outcome]:
    """Wait until every rank has reported and ended, and return the reports in rank order.

    Args:
        processes: the ranks' processes.
        seconds: how long they may take; ``None`` is as long as they like.
        rank_zero_is_done: given where rank 0 is no process of these, but a thread of this one that sets the event.
            The processes then go on running after their reports, for the next call.

    Raises:
        BaseException: what a rank raised first, in its own type, caused by a `WorkerTraceback`.
        WorkerDiedError: a rank's process ended without a word.
        WorkerTimeoutError: they were not done in time.
    """
    outcomes: dict[int, Outcome] = {}
    failures: list[Outcome | Death] = []
    parked = rank_zero_is_done is not None
    waiting = {process.conn: process for process in processes}
    deadline = None if seconds is None else time.monotonic() + seconds
    try:
        while waiting:
            ready = wait(list(waiting), _remaining(deadline))
            if not ready and failures:
                break  # the others had their time to add to it
            if not ready:
                raise _out_of_time(processes, outcomes, seconds)
            for conn in ready:
                process = waiting.pop(conn)  # type: ignore[call-overload]
                told = _report(process)
                if isinstance(told, Outcome):
                    outcomes[process.rank] = told
                if isinstance(told, Death) or told.failed:
                    failures.append(told)
                    settle = time.monotonic() + SETTLE_SECONDS
                    deadline = settle if deadline is None else min(deadline, settle)
        if failures:
            finished = [rank for rank, outcome in outcomes.items() if not outcome.failed]
            if rank_zero_is_done is not None and rank_zero_is_done.is_set():
                finished.append(0)
            raise_failure(first_cause(failures), failures, finished)
        if not parked:
            _all_leave(processes, time.monotonic() + EXIT_SECONDS)
            stop(processes)
        return [outcomes[process.rank] for process in processes]
    except BaseException:
        stop(processes, all_they_started=True)
        raise


def _report(process: Process) -> Outcome | Death:
    try:
        told: Outcome = process.conn.recv()
    except (EOFError, OSError):
        return Death(process.rank, process.pid, process.exitcode(EXIT_SECONDS), time.time())
    return told


def first_cause(failures: Sequence[Outcome | Death]) -> Outcome | Death:
    """Pick the failure that explains the others: the earliest that is not a mere echo of a lost peer.

    A rank that dies silently is noticed after its peers' complaints, so an echo never wins over it.
    """
    return min(failures, key=lambda failure: (is_echo(failure), failure.time))


def raise_failure(
    cause: Outcome | Death, failures: Sequence[Outcome | Death], finished: Sequence[int] = ()
) -> NoReturn:
    """Raise what happened on a rank here, in its own type where that can be."""
    others = sorted({failure.rank for failure in failures} - {cause.rank})
    also = f"\n(ranks that failed afterwards: {', '.join(map(str, others))})" if others else ""
    if isinstance(cause, Death):
        number = -cause.exitcode if cause.exitcode is not None and cause.exitcode < 0 else None
        host = socket.gethostname()
        raise WorkerDiedError(
            f"rank {cause.rank} on {host} (pid {cause.pid}) ended without a word: "
            f"{describe_exit(cause.exitcode)}. What it printed last is above.{also}",
            rank=cause.rank,
            host=host,
            exitcode=cause.exitcode,
            signal=number,
        )
    known = {"rank": cause.rank, "host": cause.host, "exitcode": 1, "signal": None}
    where = f"rank {cause.rank} on {cause.host} (pid {cause.pid})"
    over_there = WorkerTraceback(
        f"{where} raised:\n\n{cause.traceback}{also}", rank=cause.rank, host=cause.host, exitcode=1
    )
    if finished and is_echo(cause):
        done = ", ".join(map(str, sorted(finished)))
        raise CollectiveError(
            f"{where} waited in a collective for rank(s) {done}, which had left the function already. Every rank must "
            f"call the same collectives: look for a branch, a break or a loop that differs between ranks, above."
        ) from over_there
    error: BaseException | None = None
    if cause.error is not None:
        with contextlib.suppress(Exception):
            error = transport.unpack_result(cause.error)
    if error is None:
        raise WorkerError(
            f"{where} raised {cause.summary} (an exception that cannot be pickled, so not in its own type here)",
            rank=cause.rank,
            host=cause.host,
            exitcode=1,
        ) from over_there
    for name, value in known.items():
        if not hasattr(error, name):
            with contextlib.suppress(AttributeError, TypeError):
                setattr(error, name, value)
    raise error from over_there


def describe_exit(exitcode: int | None) -> str:
    """Put an exit code into words."""
    if exitcode is None:
        return "it still runs, but let go of its connection"
    if exitcode >= 0:
        return f"exit code {exitcode}"
    hints = {
        signal.SIGKILL: "most likely for want of memory, if nobody killed it by hand",
        signal.SIGSEGV: "a crash in native code",
        signal.SIGBUS: "most often a full /dev/shm",
        signal.SIGTERM: "somebody asked it to stop",
        signal.SIGABRT: "native code gave up: gloo does when ranks call different collectives",
    }
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        return f"killed by signal {-exitcode}"
    hint = hints.get(signal.Signals(-exitcode))
    return f"killed by {name}" + (f" ({hint})" if hint else "")


def stop(processes: Sequence[Process], *, all_they_started: bool = False) -> None:
    """End every rank that still runs: SIGTERM, a grace, SIGKILL; on wish what the ranks had started too."""
    running = [process for process in processes if process.exitcode(0) is None]
    for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, EXIT_SECONDS)):
        if not running:
            break
        for process in running:
            kill(process, number)
        _all_leave(running, time.monotonic() + seconds)
        running = [process for process in running if process.exitcode(0) is None]
    for process in processes:
        if all_they_started:
            kill(process, signal.SIGKILL)
        process.close()


def _all_leave(processes: Sequence[Process], deadline: float) -> bool:
    return all(process.exitcode(_remaining(deadline) or 0) is not None for process in processes)


def _remaining(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def is_echo(failure: Outcome | Death) -> bool:
    """Say whether a failure is the mere echo of a lost peer."""
    return isinstance(failure, Outcome) and any(echo in failure.summary for echo in _ECHOES)


def _out_of_time(
    processes: Sequence[Process], outcomes: dict[int, Outcome], seconds: float | None
) -> WorkerTimeoutError:
    late = [process for process in processes if process.rank not in outcomes]
    for process in late:
        kill(process, signal.SIGABRT)  # faulthandler prints the Python stacks of all its threads
    _all_leave(late, time.monotonic() + 1)
    ranks = ", ".join(str(process.rank) for process in late)
    return WorkerTimeoutError(
        f"rank(s) {ranks} of {len(processes)} on {socket.gethostname()} did not finish within {seconds:g} s; "
        f"the stack of each is above, on standard error.",
        rank=late[0].rank if late else None,
        host=socket.gethostname(),
    )
