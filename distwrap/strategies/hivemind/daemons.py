"""Processes that hivemind forks, which end with the rank, however that ends, and leave no files."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing import resource_sharer
from pathlib import Path

from distwrap import locked_folder
from distwrap._internals.hivemind import put_sockets_in
from distwrap._internals.python import multiprocessing_settings

_KIND = "peer"  # in names of temporary folders; short, since socket names are limited
_ROOM = 107 - len("/distwrap-peer-12345678/p2pclient-12345678901.sock")
_KEY = "tempdir"  # key of multiprocessing's folder of sockets
_GUARD = 'cat > /dev/null; rm -rf -- "$0"'  # its input ends with the rank
_GUARD_SECONDS = 5.0

_is_forking = threading.local()


class SocketFolder:
    """Folder of the sockets of hivemind's processes, which is removed when this process ends or is killed."""

    def __init__(self) -> None:
        place = os.environ.get("TMPDIR", "/tmp")
        place = place if len(place) <= _ROOM else "/tmp"
        locked_folder.remove_abandoned(_KIND, place=place)
        self.path: Path = locked_folder.make(_KIND, place)
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, str(self.path)], stdin=subprocess.PIPE, start_new_session=True
        )
        self._before = put_sockets_in(f"/unix{self.path}/")
        self._settings = multiprocessing_settings()
        self._is_multiprocessings = self._settings.get(_KEY) is None
        if self._is_multiprocessings:  # else a killed process would leave multiprocessing's folder
            self._settings[_KEY] = str(self.path)

    def remove(self) -> None:
        """Remove the folder, and end its guard process."""
        put_sockets_in(self._before)
        if self._is_multiprocessings:
            self._settings[_KEY] = None
            resource_sharer.stop(_GUARD_SECONDS)  # its socket is there, and it would complain at the end
        locked_folder.remove(self.path)
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        try:
            self._guard.wait(_GUARD_SECONDS)
        except subprocess.TimeoutExpired:  # a fork of this process holds the pipe open
            self._guard.kill()
            self._guard.wait()


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Let hivemind fork its processes within a ``with``, also from a daemonic process, with any start method.

    hivemind also makes this process ignore Ctrl-C, which is undone here.
    """
    _tie_forks()
    me, method = multiprocessing.current_process(), multiprocessing.get_start_method(allow_none=True)
    is_daemon, on_interrupt = me.daemon, signal.getsignal(signal.SIGINT)
    multiprocessing.set_start_method("fork", force=True)
    _is_forking.here = True
    try:
        me.daemon = False
        yield
    finally:
        _is_forking.here = False
        me.daemon = is_daemon
        multiprocessing.set_start_method(method, force=True)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, on_interrupt if on_interrupt is not None else signal.default_int_handler)


@functools.cache
def _tie_forks() -> None:
    os.register_at_fork(before=_note_parent, after_in_child=_in_fork)


def _note_parent() -> None:
    if getattr(_is_forking, "here", False):
        _is_forking.parent = os.getpid()


def _in_fork() -> None:
    """End a process forked by hivemind together with its parent."""
    if not getattr(_is_forking, "here", False):
        return
    _is_forking.here = False
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # hivemind uses it for processes that do not end
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != _is_forking.parent:  # the parent has ended meanwhile
        os._exit(1)
