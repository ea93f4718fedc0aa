"""Signals for a process whose main thread may be in native code, where Python would hear them only afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

_END = b"\0"  # no signal has this number


class Interrupts:
    """Hears SIGINT and SIGQUIT on a thread for the time of a ``with`` in the main thread.

    Python's own handlers stay: where the main thread runs Python, a Ctrl-C is a KeyboardInterrupt as ever.

    Args:
        on_interrupt: called on the thread for each Ctrl-C.
        on_quit: called on the thread for SIGQUIT, unless the user has a handler for it.
    """

    def __init__(self, on_interrupt: Callable[[], None], on_quit: Callable[[], None]) -> None:
        self._calls = {signal.SIGINT: on_interrupt, signal.SIGQUIT: on_quit}
        self._thread = threading.Thread(target=self._listen, name="distwrap-interrupts", daemon=True)

    def __enter__(self) -> Interrupts:
        self._readable, self._writable = os.pipe()
        os.set_blocking(self._writable, False)
        self._before = signal.set_wakeup_fd(self._writable, warn_on_full_buffer=False)
        self._has_quit = signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL
        if self._has_quit:
            signal.signal(signal.SIGQUIT, _do_nothing)  # without a handler nothing is written to the pipe
        _begin_forgetting_in_forks()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._before)
        if self._has_quit:
            signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        os.write(self._writable, _END)
        self._thread.join()
        os.close(self._writable)
        os.close(self._readable)

    def _listen(self) -> None:
        numbers = b""
        while _END not in numbers:
            numbers = os.read(self._readable, 64)
            for number in numbers:
                if number in self._calls:
                    with contextlib.suppress(Exception):  # nobody could catch it here
                        self._calls[signal.Signals(number)]()


_forgets = False


def _begin_forgetting_in_forks() -> None:
    """Keep forks, as a loader's workers, from writing their signals into our pipe."""
    global _forgets
    if not _forgets:
        _forgets = True
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def _do_nothing(number: int, frame: FrameType | None) -> None: ...
