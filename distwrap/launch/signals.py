"""Signals that reach the caller while ranks run: passed on to them, or answered with where they are."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from distwrap.launch.processes import Process, kill

PASSED_ON = (signal.SIGTERM, signal.SIGUSR2)  # the ways in which clusters announce that they want the machine back


@contextmanager
def passed_on(processes: Sequence[Process], report: Callable[[], None]) -> Iterator[None]:
    """Pass SIGTERM and SIGUSR2 on to the ranks for the time of a ``with``, and answer SIGQUIT with a report.

    A rank that iterates over `lockstep` stops in step with the others; any other is ended by the signal. If the ranks
    fail of it, this process ends by the same signal, as it would have without ranks. A handler of the user's own runs
    too, and one that ignores the signal is left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[signal.Signals, Any] = {}
    heard: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        for process in processes:
            kill(process, number, with_children=False)
        if callable(before[signal.Signals(number)]):
            before[signal.Signals(number)](number, frame)

    def answer(number: int, frame: FrameType | None) -> None:
        report()

    for number in PASSED_ON:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            before[number] = signal.signal(number, pass_on)
    if signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL:
        before[signal.SIGQUIT] = signal.signal(signal.SIGQUIT, answer)
    failed = True
    try:
        yield
        failed = False
    finally:
        for known, handler in before.items():
            signal.signal(known, handler)
        if failed and heard and before[signal.Signals(heard[0])] == signal.SIG_DFL:
            os.kill(os.getpid(), heard[0])
