"""Processes that hivemind forks, tied to the rank: they end with it, however that ends, and leave no file behind."""

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

_KIND = "peer"  # of temporary folders; short, as names of sockets are limited
_ROOM = 107 - len("/distwrap-peer-12345678/p2pclient-12345678901.sock")
_KEY = "tempdir"  # where multiprocessing keeps the name of its folder of sockets
_GUARD = 'cat > /dev/null; rm -rf -- "$0"'  # whose input ends as the rank does
_GUARD_SECONDS = 5.0

_is_forking = threading.local()


class SocketFolder:
    """Folder of the sockets of hivemind's processes, which goes when this process ends, also where that is killed."""

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
        if self._is_multiprocessings:  # which would leave a folder of its own where this process is killed
            self._settings[_KEY] = str(self.path)

    def remove(self) -> None:
        """Remove the folder, and end the process that would."""
        put_sockets_in(self._before)
        if self._is_multiprocessings:
            self._settings[_KEY] = None
            resource_sharer.stop(_GUARD_SECONDS)  # which has its socket there, and would complain as the process ends
        locked_folder.remove(self.path)
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        try:
            self._guard.wait(_GUARD_SECONDS)
        except subprocess.TimeoutExpired:  # a fork of this process holds the pipe on
            self._guard.kill()
            self._guard.wait()


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Let hivemind fork its processes within a ``with``: from a daemonic process too, and by whatever start method.

    hivemind also leaves this process deaf to Ctrl-C, which is mended here.
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
    """Let a process that hivemind has forked end with the one that has forked it."""
    if not getattr(_is_forking, "here", False):
        return
    _is_forking.here = False
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # hivemind ends by it what does not end by itself
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != _is_forking.parent:  # which ended meanwhile
        os._exit(1)
