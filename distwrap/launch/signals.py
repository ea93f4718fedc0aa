"""Signals that reach the caller while ranks run: passed on to them, answered, or heard while it is in native code."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

from distwrap.data.preemption import SIGNALS
from distwrap.launch.processes import Process

_END = b"\0"  # no signal has this number


class SignalForwarder:
    """Signals of the caller that go to the ranks until the end of a ``with``: SIGTERM and SIGUSR2.

    A rank that iterates over `lockstep` stops in step with the others; any other is ended by the signal. If the ranks
    fail of it, this process ends by the same signal when all else is done, as it would have without ranks. A handler
    of the user's own runs too, and one that ignores the signal is left alone. SIGQUIT is answered with a report.
    Nothing happens outside of the main thread, where Python handles no signals.
    """

    def __init__(self) -> None:
        self._processes: Sequence[Process] = ()
        self._before: dict[int, Any] = {}
        self._heard: list[int] = []
        self._unheeded = False

    def __enter__(self) -> SignalForwarder:
        return self

    def listen(self, processes: Sequence[Process], report: Callable[[], None]) -> None:
        """Begin, now that all ranks are started: a fork would inherit the handlers.

        Args:
            processes: the ranks' processes.
            report: answers SIGQUIT.
        """
        self._processes = processes
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._pass_on)
            if signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL:
                self._before[signal.SIGQUIT] = signal.signal(signal.SIGQUIT, lambda *_: report())

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._heard and (error is not None or self._unheeded) and self._before[self._heard[0]] == signal.SIG_DFL:
            os.kill(os.getpid(), self._heard[0])

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._heard.append(number)
        for process in self._processes:
            process.signal(number, with_children=False)
        if callable(self._before[number]):
            self._before[number](number, frame)

    def ended(self, codes: list[int | None]) -> None:
        """Take note of the exit codes of ranks that had finished, to which signals went no more."""
        self._unheeded = any(-number in codes for number in self._heard)


def end_in_one_line(interrupt: BaseException) -> None:
    """Let Python say in one line that a Ctrl-C has ended the program, if nobody catches the exception.

    Its traceback would only show how this process waited for the ranks.
    """
    interrupt.ends_in_one_line = True  # type: ignore[attr-defined]
    _say_interrupts_in_one_line()


@functools.cache
def _say_interrupts_in_one_line() -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if hasattr(error, "ends_in_one_line"):
            print("KeyboardInterrupt: the ranks have ended", file=sys.stderr)
        else:
            before(kind, error, trace)

    sys.excepthook = hook


@contextlib.contextmanager
def interrupt_listener(on_interrupt: Callable[[], None], on_quit: Callable[[], None]) -> Iterator[None]:
    """Receive SIGINT and SIGQUIT on a thread within a ``with`` in the main thread.

    Python's own handlers stay: where the main thread runs Python, a Ctrl-C is a KeyboardInterrupt as ever.

    Args:
        on_interrupt: called on the thread for each Ctrl-C.
        on_quit: called on the thread for SIGQUIT, unless the user has a handler for it.
    """
    calls = {int(signal.SIGINT): on_interrupt, int(signal.SIGQUIT): on_quit}
    readable, writable = os.pipe()

    def listen() -> None:
        numbers = b""
        while _END not in numbers:
            numbers = os.read(readable, 64)
            for number in filter(calls.__contains__, numbers):
                with contextlib.suppress(Exception):  # nobody could catch it here
                    calls[number]()

    thread = threading.Thread(target=listen, name="distwrap-interrupts", daemon=True)
    os.set_blocking(writable, False)
    before = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    quits = signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL
    if quits:
        signal.signal(signal.SIGQUIT, lambda *_: None)  # without a handler nothing is written to the pipe
    _forget_in_forks()
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        if quits:
            signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        os.write(writable, _END)
        thread.join()
        os.close(writable)
        os.close(readable)


@functools.cache
def _forget_in_forks() -> None:
    """Keep forks, as a loader's workers, from writing their signals into our pipe."""
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
