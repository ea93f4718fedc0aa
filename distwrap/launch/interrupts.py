"""Signals for a process whose main thread may be in native code, where Python would hear them only afterwards."""

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator

_END = b"\0"  # no signal has this number


@contextlib.contextmanager
def hear_interrupts(on_interrupt: Callable[[], None], on_quit: Callable[[], None]) -> Iterator[None]:
    """Hear SIGINT and SIGQUIT on a thread for the time of a ``with`` in the main thread.

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
