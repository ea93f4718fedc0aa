"""Signals that reach the caller while ranks run: passed on to them, or answered with where they are."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from distwrap.launch.processes import Process

PASSED_ON = (signal.SIGTERM, signal.SIGUSR2)  # the ways in which clusters announce that they want the node back


class PassedOn:
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

    def __enter__(self) -> PassedOn:
        return self

    def listen(self, processes: Sequence[Process], report: Callable[[], None]) -> None:
        """Begin, now that all ranks are started: a fork would inherit the handlers.

        Args:
            processes: the ranks' processes.
            report: answers SIGQUIT.
        """
        self._processes = processes
        if threading.current_thread() is threading.main_thread():
            for number in PASSED_ON:
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
        """Take the exit codes of ranks that had done their work, and so heard no signal any more."""
        self._unheeded = any(-number in codes for number in self._heard)
