"""Wait for the ranks, find what failed first, and leave none behind."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import NoReturn

from distwrap.errors import CollectiveError, WorkerDiedError, WorkerError, WorkerTimeoutError, WorkerTraceback
from distwrap.group import failures
from distwrap.launch import transport
from distwrap.launch.exit_reason import OomCount, describe_exit
from distwrap.launch.nodes import Nodes
from distwrap.launch.processes import Process, kill
from distwrap.launch.signals import PassedOn
from distwrap.launch.transport import Outcome
from distwrap.network.rendezvous import side_store
from distwrap.supervision import hang_report

SETTLE_SECONDS = 0.3  # after a failure, for the other ranks' accounts of it
CAUSE_SECONDS = 4.0  # after the mere echo of a failure, for the failure itself
EXIT_SECONDS = 5.0  # for a rank that has reported to end by itself
GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL
INTERRUPT_SECONDS = 2.0  # between SIGINT and SIGTERM


@dataclass(frozen=True)
class Death:
    """The end of a rank that said nothing."""

    rank: int
    pid: int
    exitcode: int | None
    time: float
    oom_kills: int | None = None
    last_seen: str = ""


def supervise(
    processes: Sequence[Process],
    *,
    store: str = "",
    ranks: int | None = None,
    seconds: float | None = None,
    signals: PassedOn | None = None,
    rank_zero_is_done: threading.Event | None = None,
    nodes: Nodes | None = None,
) -> list[Outcome]:
    """Wait until every rank has reported and ended, and return the reports in rank order.

    Args:
        processes: the ranks' processes.
        store: where they have met.
        ranks: how many have met there; by default these.
        seconds: how long they may take; ``None`` is as long as they like.
        signals: is told how the ranks have ended.
        rank_zero_is_done: given where rank 0 is no process of these, but a thread of this one that sets the event.
            The processes then go on running after their reports, for the next call.
        nodes: the callers on other machines, who may have news of a failure there.

    Raises:
        BaseException: what a rank raised first, in its own type, caused by a `WorkerTraceback`.
        WorkerDiedError: a rank's process ended without a word.
        WorkerTimeoutError: they were not done in time, or none of them moved any more.
    """
    try:
        outcomes = _all_report(processes, store, ranks or len(processes), seconds, rank_zero_is_done, nodes)
    except KeyboardInterrupt as interrupt:
        by_hand = not hasattr(interrupt, "rank")  # else it is a rank's own
        stop(processes, all_they_started=True, interrupt=by_hand)
        raise
    except BaseException as error:
        if nodes is not None:
            nodes.tell(error)  # now, since the others have lost peers
        stop(processes, all_they_started=True)
        raise
    if rank_zero_is_done is None:
        codes = _all_end(processes)
        if signals is not None:
            signals.ended(codes)
    return [outcomes[process.rank] for process in processes]


def _all_report(
    processes: Sequence[Process],
    store: str,
    ranks: int,
    seconds: float | None,
    rank_zero_is_done: threading.Event | None,
    nodes: Nodes | None,
) -> dict[int, Outcome]:
    outcomes: dict[int, Outcome] = {}
    failed: list[Outcome | Death] = []
    waiting = {process.conn: process for process in processes}
    deadline = None if seconds is None else time.monotonic() + seconds
    oom_kills = OomCount()
    while waiting or _cause_is_elsewhere(failed, nodes):
        news = [nodes.news] if nodes is not None and (not failed or _cause_is_elsewhere(failed, nodes)) else []
        ready = wait([*waiting, *news], _remaining(deadline))
        if not ready and failed:
            break  # the others had their time to add to it
        if not ready:
            raise _out_of_time(processes, outcomes, seconds, store, ranks)
        for conn in ready:
            if nodes is not None and conn is nodes.news:
                failed.append(nodes.news.recv())
                deadline = 0.0
                continue
            process = waiting.pop(conn)  # type: ignore[call-overload]
            told = _report(process, oom_kills, store)
            if isinstance(told, Outcome):
                outcomes[process.rank] = told
            if isinstance(told, Death) or told.failed:
                failed.append(told)
                echo = is_secondary_failure(first_cause(failed))
                if echo and nodes is not None:
                    nodes.hurry()
                patience = CAUSE_SECONDS if echo else SETTLE_SECONDS
                settled = time.monotonic() + patience
                deadline = settled if deadline is None else min(deadline, settled)
    if failed:
        finished = [rank for rank, outcome in outcomes.items() if not outcome.failed]
        if rank_zero_is_done is not None and rank_zero_is_done.is_set():
            finished.append(0)
        raise_failure(first_cause(failed), failed, finished)
    return outcomes


def _cause_is_elsewhere(failed: Sequence[Outcome | Death], nodes: Nodes | None) -> bool:
    return nodes is not None and bool(failed) and is_secondary_failure(first_cause(failed))


def _report(process: Process, oom_kills: OomCount, store: str) -> Outcome | Death:
    try:
        told: Outcome = process.conn.recv()
    except (EOFError, OSError):
        code = process.exitcode(EXIT_SECONDS)
        return Death(process.rank, process.pid, code, time.time(), oom_kills(), _last_seen(store, process.rank))
    return told


def _all_end(processes: Sequence[Process]) -> list[int | None]:
    """Wait for the ends of ranks that have all reported success, and warn of those that end badly.

    Returns:
        The exit codes; ``None`` for a rank that had to be stopped.
    """
    codes: dict[int, int | None] = {}
    try:
        _all_leave(processes, time.monotonic() + EXIT_SECONDS)
        codes = {process.rank: process.exitcode(0) for process in processes}
    finally:
        stop(processes, all_they_started=not codes or None in codes.values())
    for rank, code in codes.items():
        if code:
            how = describe_exit(code)
        elif code is None:
            how = f"did not end within {EXIT_SECONDS:g} s, and was stopped: look at its exit handlers and threads"
        else:
            continue
        warnings.warn(
            f"rank {rank} on {socket.gethostname()} had done its work, and its result is whole, but then: {how}.",
            RuntimeWarning,
            stacklevel=2,
        )
    return list(codes.values())


def first_cause(failed: Sequence[Outcome | Death]) -> Outcome | Death:
    """Pick the failure that explains the others: the earliest that is not a mere echo of a lost peer.

    A rank that dies silently is noticed after its peers' complaints, so an echo never wins over it.
    """
    return min(failed, key=lambda failure: (is_secondary_failure(failure), failure.time))


def raise_failure(cause: Outcome | Death, failed: Sequence[Outcome | Death], finished: Sequence[int] = ()) -> NoReturn:
    """Raise what happened on a rank here, in its own type where that can be."""
    others = sorted({failure.rank for failure in failed} - {cause.rank})
    also = f"\n(ranks that failed afterwards: {', '.join(map(str, others))})" if others else ""
    if isinstance(cause, Death):
        number = -cause.exitcode if cause.exitcode is not None and cause.exitcode < 0 else None
        host = socket.gethostname()
        raise WorkerDiedError(
            f"rank {cause.rank} on {host} (pid {cause.pid}) ended without a word: "
            f"{describe_exit(cause.exitcode, cause.oom_kills)}{cause.last_seen}. What it printed last is above.{also}",
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
    if finished and is_secondary_failure(cause):
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
    if isinstance(error, SystemExit) and error.code not in (None, 0):
        print(f"distwrap: {where} called sys.exit({error.code!r})", file=sys.stderr, flush=True)
    raise error from over_there


def stop(processes: Sequence[Process], *, all_they_started: bool = False, interrupt: bool = False) -> None:
    """End every rank that still runs: SIGTERM, a grace, SIGKILL.

    Args:
        processes: the ranks' processes.
        all_they_started: end what the ranks have started as well, also of those that have ended.
        interrupt: begin with SIGINT, so that a rank's own ``except KeyboardInterrupt`` and ``finally`` run.
    """
    grace = [(signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, EXIT_SECONDS)]
    if interrupt:
        grace = [(signal.SIGINT, INTERRUPT_SECONDS), (signal.SIGTERM, INTERRUPT_SECONDS / 2), grace[-1]]
    try:
        for number, seconds in grace:
            running = [process for process in processes if process.exitcode(0) is None]
            if not running:
                break
            for process in running:
                kill(process, number, with_children=number != signal.SIGINT)
            _all_leave(running, time.monotonic() + seconds)
    except KeyboardInterrupt:  # the second Ctrl-C
        for process in processes:
            kill(process, signal.SIGKILL)
        _all_leave(processes, time.monotonic() + EXIT_SECONDS)
        raise
    finally:
        for process in processes:
            if all_they_started:
                kill(process, signal.SIGKILL)
            process.close()


def _all_leave(processes: Sequence[Process], deadline: float) -> bool:
    return all(process.exitcode(_remaining(deadline) or 0) is not None for process in processes)


def _remaining(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def is_secondary_failure(failure: Outcome | Death) -> bool:
    """Say whether a failure is the mere echo of a lost peer."""
    return isinstance(failure, Outcome) and failures.is_secondary_failure(failure.summary)


def _out_of_time(
    processes: Sequence[Process], outcomes: dict[int, Outcome], seconds: float | None, store: str, ranks: int
) -> WorkerTimeoutError:
    late = [process for process in processes if process.rank not in outcomes]
    places = _where_all_are(store, ranks)
    for process in late:
        kill(process, signal.SIGABRT)  # faulthandler prints the Python stacks of all its threads
    _all_leave(late, time.monotonic() + 1)
    names = ", ".join(str(process.rank) for process in late)
    return WorkerTimeoutError(
        f"rank(s) {names} of {ranks} on {socket.gethostname()} did not finish within {seconds:g} s:\n"
        f"{places}\nThe whole stack of each is above, on standard error.",
        rank=late[0].rank if late else None,
        host=socket.gethostname(),
    )


def _where_all_are(store: str, ranks: int) -> str:
    if not store:
        return "  nobody can be asked"
    try:
        return hang_report.where_all_are(side_store(store), ranks)
    except RuntimeError as error:
        return f"  nobody can be asked: {error}"


def print_where_all_are(store: str, ranks: int) -> None:
    """Print where each rank is, in answer to SIGQUIT."""
    print(f"distwrap: where the ranks are:\n{_where_all_are(store, ranks)}", file=sys.stderr, flush=True)


def _last_seen(store: str, rank: int) -> str:
    return hang_report.last_seen(side_store(store), rank) if store else ""
