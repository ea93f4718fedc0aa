"""Rank 0 of ``launcher="script"``, which is the caller: how it is watched and interrupted as the other ranks are."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Pipe
from types import FrameType

from distwrap.errors import WorkerTimeoutError
from distwrap.group import failures
from distwrap.launch.outcome import CAUSE_SECONDS, Outcome, failure
from distwrap.launch.processes import CommandProcess, Process
from distwrap.launch.store_file import Rendezvous
from distwrap.launch.supervisor import INTERRUPT_SECONDS, supervise


class _AnotherFailed(BaseException):
    """Interruption of rank 0's function, since another rank has failed, or none moves; never seen outside."""


class RankZero(Process):
    """This process as a rank like the others, which the supervisor waits for and ends.

    Its function runs in the main thread. What ends it is an exception out of a signal's handler, which wakes the thread
    from a sleep or a read as well. The signal is one that does nothing without our handler, and the handler does
    nothing outside of the function: so it is never taken for a Ctrl-C, and never comes late.
    """

    _SIGNAL = signal.SIGURG

    def __init__(self) -> None:
        self.rank, self.pid = 0, os.getpid()
        self.conn, self._word = Pipe(duplex=False)
        self._reporting = threading.Lock()
        self._outcome: Outcome | None = None
        self.has_left = threading.Event()
        self._in_function = self._is_called = False

    @contextmanager
    def hear_of_failures(self) -> Iterator[None]:
        """Install the handler for the time of a ``with``."""
        before = signal.signal(self._SIGNAL, self._leave_function)
        try:
            yield
        finally:
            signal.signal(self._SIGNAL, before)
            self.conn.close()
            self._word.close()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Be in the function, and so open to interruption, for the time of a ``with``."""
        self._in_function = True
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """Be out of the function, which is no longer interrupted."""
        self._in_function = False
        self.has_left.set()

    def _leave_function(self, number: int, frame: FrameType | None) -> None:
        if self._in_function and self._is_called:  # other programs send the signal too, as Go's do to themselves
            raise _AnotherFailed

    def report(self, outcome: Outcome) -> bool:
        """Hand the supervisor the outcome, if it is the first; return whether it is."""
        with self._reporting:
            if self._outcome is not None:
                return False
            self._outcome = outcome
            with suppress(OSError):  # the supervisor has found another failure, and is done
                self._word.send(outcome)
        return True

    @property
    def has_failed(self) -> bool:
        """Whether a failure is what was reported."""
        return self._outcome is not None and self._outcome.failed

    def stalled(self, report: str) -> None:
        """End the run, in which no rank moves."""
        self.report(failure(0, WorkerTimeoutError(report, rank=0, host=socket.gethostname())))

    def signal(self, number: int, *, with_children: bool = True) -> None:
        main = threading.main_thread().ident
        assert main is not None
        self._is_called = True
        if not self.has_left.is_set():
            signal.pthread_kill(main, self._SIGNAL)

    def exitcode(self, seconds: float) -> int | None:
        return 0 if self.has_left.wait(seconds) else None


class Supervision(threading.Thread):
    """Thread that supervises all ranks, of which rank 0 works in the main thread."""

    def __init__(self, zero: RankZero, others: list[CommandProcess], met: Rendezvous) -> None:
        super().__init__(name="distwrap-script-watch", daemon=True)
        self._zero, self._others, self._met = zero, others, met
        self.interrupted = False
        self._error: BaseException | None = None
        self._outcomes: list[Outcome] = []

    def run(self) -> None:
        try:
            self._outcomes = supervise([self._zero, *self._others], self._met, rank_zero_is_caller=True)
        except BaseException as error:  # noqa: BLE001 - it is raised in the main thread
            self._error = error

    def interrupt(self) -> None:
        """End a collective that keeps rank 0 from seeing a Ctrl-C, by ending the other ranks."""
        seconds = 0.0 if self.interrupted else INTERRUPT_SECONDS
        self.interrupted = True
        threading.Thread(target=self._leave_it_alone, args=(seconds,), daemon=True).start()

    def _leave_it_alone(self, seconds: float) -> None:
        if not self._zero.has_left.wait(seconds):
            for process in self._others:
                process.signal(signal.SIGKILL)

    def outcomes(self) -> list[Outcome]:
        """Wait for the others' reports, after rank 0's own work."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._outcomes

    def cause_of(self, error: BaseException) -> BaseException:
        """Return, after a failure of rank 0, the one that came first and caused it, which may be this one."""
        try:
            error = failures.explained(error)
            is_told = self._zero.report(failure(0, error))
            by_hand = isinstance(error, KeyboardInterrupt)
            # Of a failure the supervisor hears and makes an end; else rank 0 had done its work.
            self.join(None if self._zero.has_failed else 0 if by_hand else CAUSE_SECONDS)
        except KeyboardInterrupt as pending:  # it was not heard inside a collective
            return pending
        if self.interrupted and not by_hand:
            return KeyboardInterrupt()
        mine = by_hand or (is_told and getattr(self._error, "rank", None) == 0)
        return error if mine or self._error is None else self._error
