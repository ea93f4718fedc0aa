"""Wait for the processes of the ranks, and end all of them when one fails."""

import signal
import socket
import time
import warnings
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

from distwrap.errors import WorkerTimeoutError
from distwrap.launch.outcome import Outcome, collect, death, raise_if_failed
from distwrap.launch.processes import OomCount, Process, describe_exit
from distwrap.launch.signals import SignalForwarder, end_in_one_line
from distwrap.launch.store_file import Rendezvous
from distwrap.network.rendezvous import side_store
from distwrap.supervision import hang_report
from distwrap.supervision.failure import Failure
from distwrap.wording import named_ranks, print_notice

EXIT_SECONDS = 7.0  # for a rank that has reported to end by itself; a loader waits 5 s for a worker, and ends it
GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL
INTERRUPT_SECONDS = 2.0  # between SIGINT and SIGTERM


def supervise(
    processes: Sequence[Process],
    met: Rendezvous,
    *,
    seconds: float | None = None,
    signals: SignalForwarder | None = None,
    rank_zero_is_caller: bool = False,
) -> list[Outcome]:
    """Wait until every rank has reported and ended, and return the outcomes in rank order.

    Args:
        processes: the ranks' processes.
        met: where the ranks meet. Callers on other nodes may have news of a failure there.
        seconds: time limit for the ranks; ``None`` is none.
        signals: is told the exit codes of the ranks.
        rank_zero_is_caller: whether the first of these is this process itself. The others then go on running after
            their reports, for the next call.

    Raises:
        BaseException: the exception of the rank that failed first, in its own type, caused by a `WorkerTraceback`.
        WorkerDiedError: a rank's process ended without a report.
        WorkerTimeoutError: the ranks were not done in time, or none of them moved any more.
    """
    oom_kills = OomCount()
    try:
        waiting: dict[Any, Process] = {process.conn: process for process in processes}
        outcomes = collect(lambda left, cause: _receive(waiting, met, oom_kills, left, cause), seconds)
        raise_if_failed(outcomes)
        if waiting:
            raise _timed_out(list(waiting.values()), seconds, met)
    except BaseException as error:
        caller = 0 if rank_zero_is_caller else None  # and no other rank has raised it
        by_hand = isinstance(error, KeyboardInterrupt) and getattr(error, "rank", caller) == caller
        if by_hand:
            end_in_one_line(error)
        try:
            if met.others is not None and not by_hand:  # a Ctrl-C first ends the ranks here
                met.others.tell(error)  # at once, since the other nodes' ranks have lost their peers
        finally:
            stop(processes, all_they_started=True, interrupt=by_hand)
        raise
    if not rank_zero_is_caller:
        codes = _wait_for_ends(processes)
        if signals is not None:
            signals.ended(codes)
    return sorted(outcomes, key=lambda outcome: outcome.rank)


def _receive(
    waiting: dict[Any, Process], met: Rendezvous, oom_kills: OomCount, seconds: float | None, cause: Failure | None
) -> list[Outcome]:
    """Wait for outcomes of these ranks, which are taken out, or for news of other nodes."""
    others = met.others
    if others is not None and cause is not None and cause.secondary:
        others.hurry()
    # The cause may be on another node, as long as all failures here are secondary.
    elsewhere = [others.news] if others is not None and (cause is None or cause.secondary) else []
    if not waiting and (cause is None or not elsewhere):
        return []
    ready: list[Any] = wait([*waiting, *elsewhere], seconds)
    return [_received(waiting.pop(conn), oom_kills, met) if conn in waiting else conn.recv() for conn in ready]


def _received(process: Process, oom_kills: OomCount, met: Rendezvous) -> Outcome:
    """Return what a rank has reported, or how it has ended without a report."""
    try:
        outcome: Outcome = process.conn.recv()
    except (EOFError, OSError):
        code = process.exitcode(EXIT_SECONDS)
        last_seen = hang_report.last_seen(side_store(met.store, met.number), process.rank)
        return death(process.rank, process.pid, code, oom_kills(), last_seen)
    return outcome


def _wait_for_ends(processes: Sequence[Process]) -> list[int | None]:
    """Wait for the ends of ranks that have all reported success, and warn of those that end badly.

    Returns:
        The exit codes; ``None`` for a rank that had to be stopped.
    """
    codes: list[int | None] = []
    try:
        _all_leave(processes, time.monotonic() + EXIT_SECONDS)
        codes = [process.exitcode(0) for process in processes]
    finally:
        stop(processes, all_they_started=not codes or None in codes)
    for process, code in zip(processes, codes, strict=True):
        if code == 0:
            continue
        how = describe_exit(code)
        if code is None:
            how = f"it did not end within {EXIT_SECONDS:g} s, and was killed. Look at its exit handlers and threads"
        warnings.warn(
            f"rank {process.rank} on {socket.gethostname()} finished its work, and its result is complete, but "
            f"afterwards its process failed: {how}.",
            RuntimeWarning,
            stacklevel=2,
        )
    return codes


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
            for process in running:
                process.signal(number, with_children=number != signal.SIGINT)
            _all_leave(running, time.monotonic() + seconds)
    except KeyboardInterrupt:  # the second Ctrl-C
        for process in processes:
            process.signal(signal.SIGKILL)
        _all_leave(processes, time.monotonic() + EXIT_SECONDS)
        raise
    finally:
        for process in processes:
            if all_they_started:
                process.signal(signal.SIGKILL)
            process.close()


def _all_leave(processes: Sequence[Process], deadline: float) -> bool:
    return all(process.exitcode(max(0.0, deadline - time.monotonic())) is not None for process in processes)


def _timed_out(late: list[Process], seconds: float | None, met: Rendezvous) -> WorkerTimeoutError:
    places = _positions(met)
    for process in late:
        process.signal(signal.SIGABRT)  # faulthandler prints the Python stacks of all its threads
    _all_leave(late, time.monotonic() + 1)
    return WorkerTimeoutError(
        f"{named_ranks(process.rank for process in late)} of {met.world_size} on {socket.gethostname()} did "
        f"not finish within {seconds:g} s:\n{places}\nThe whole stack of each was printed on standard error.",
        rank=late[0].rank,
        host=socket.gethostname(),
    )


def _positions(met: Rendezvous) -> str:
    try:
        return hang_report.ask_all(side_store(met.store, met.number), met.world_size)
    except RuntimeError as error:
        return f"  the ranks cannot be asked: {error}"


def print_where_all_are(met: Rendezvous) -> None:
    """Print where each rank is, in answer to SIGQUIT."""
    print_notice(f"where the ranks are:\n{_positions(met)}")
