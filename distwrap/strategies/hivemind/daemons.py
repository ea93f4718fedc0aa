"""Processes that hivemind forks, which end with the rank, however that ends."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator

_forking = threading.local()  # its `parent` is set while hivemind forks


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Let hivemind fork its processes within a ``with``, also from a daemonic process, with any start method.

    hivemind also makes this process ignore Ctrl-C, which is undone here.
    """
    _end_forks_with_parent()
    me, method = multiprocessing.current_process(), multiprocessing.get_start_method(allow_none=True)
    is_daemon, on_interrupt = me.daemon, signal.getsignal(signal.SIGINT)
    multiprocessing.set_start_method("fork", force=True)
    _forking.parent = os.getpid()
    try:
        me.daemon = False
        yield
    finally:
        del _forking.parent
        me.daemon = is_daemon
        multiprocessing.set_start_method(method, force=True)
        signal.signal(signal.SIGINT, on_interrupt if on_interrupt is not None else signal.default_int_handler)


@functools.cache
def _end_forks_with_parent() -> None:
    os.register_at_fork(after_in_child=_in_fork)


def _in_fork() -> None:
    """End a process forked by hivemind together with its parent."""
    parent = _forking.__dict__.pop("parent", None)
    if parent is None:
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # hivemind uses it for processes that do not end
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has ended meanwhile
        os._exit(1)
