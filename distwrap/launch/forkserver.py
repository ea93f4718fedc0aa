"""``launcher="forkserver"``: ranks that are forks of a warm server, which `distwrap.launch.server` is.

The server has torch imported and no accelerator touched. It is started at the first launch, and serves this process
until that ends.
"""

from __future__ import annotations

import atexit
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe, wait

from distwrap._internals.python import interpreter_flags
from distwrap.errors import LaunchError
from distwrap.launch.base import Job
from distwrap.launch.local import LocalLauncher
from distwrap.launch.logs import Streams
from distwrap.launch.processes import ONE_HASH, Process, python_command, standard_streams
from distwrap.launch.server import DESCRIPTORS, STATUS


class ForkServerLauncher(LocalLauncher):
    """Forks of a warm server: as fast as forks of this process, whatever this process has done."""

    name = "forkserver"
    start_method = "forkserver"

    def start(self, job: Job, rank: int, earlier: Sequence[Process], streams: Streams | None) -> Process:
        return ServedProcess(rank, warm_server(), streams)


class ServedProcess(Process):
    """A fork of the warm server.

    Args:
        rank: the rank.
        server: the server.
        streams: its standard output and error; by default this process's.
    """

    def __init__(self, rank: int, server: ForkServer, streams: Streams | None = None) -> None:
        self.rank, self._server = rank, server
        server.ranks.add(self)
        self.conn, theirs = Pipe()
        self._status, status = os.pipe()
        self._exitcode: int | None = None
        self._ended = False
        try:
            try:
                stdin, *own = standard_streams()
                server.fork([stdin, *(streams or own), theirs.fileno(), status])
            finally:
                theirs.close()
                os.close(status)
            pid = self._read(server.start_seconds)
            if pid is None:
                raise LaunchError(
                    f"the fork server (pid {server.pid}) ended before it started rank {rank}: if it had an "
                    "error, it printed that on standard error. Use launcher='spawn' to start without it."
                )
        except BaseException:  # a Ctrl-C too: the rank, which nobody else knows of, ends with its connection
            self.close()
            raise
        self.pid = pid

    def exitcode(self, seconds: float) -> int | None:
        if self._exitcode is None:
            code = self._read(seconds)
            # The server died before the rank: the kernel killed the rank with it.
            self._exitcode = -signal.SIGKILL if code is None and self._ended else code
        return self._exitcode

    def close(self) -> None:
        super().close()
        self._server.ranks.discard(self)
        if self._status >= 0:
            os.close(self._status)
            self._status = -1

    def _read(self, seconds: float) -> int | None:
        if not wait([self._status], seconds):
            return None
        data = os.read(self._status, STATUS.size)
        self._ended = not data
        return int(STATUS.unpack(data)[0]) if data else None


# Its imports take seconds, in which it must end with its caller too.
_SERVER = """
import os, select, threading
imported = threading.Event()

def watch():
    caller = select.poll()
    caller.register({fd}, 0)
    while not imported.wait(0.02):
        if caller.poll(0):
            os._exit(0)

watcher = threading.Thread(target=watch)
watcher.start()
try:
    from distwrap.launch.server import prepare, serve
    prepare()
finally:
    imported.set()
    watcher.join()
gc.enable()
serve({fd})
"""


class ForkServer:
    """This process's end of the fork server."""

    start_seconds = 120.0  # importing torch from a cold network disk takes its time

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            python_command(_SERVER.format(fd=theirs.fileno())),
            pass_fds=(theirs.fileno(),),
            env={**ONE_HASH, **os.environ},  # for the ranks of several nodes
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._control = ours
        self._owner = os.getpid()
        self.ranks: set[ServedProcess] = set()  # that somebody waits for
        self.pid = self._process.pid
        self.key = _server_key()

    def usable(self) -> bool:
        """Return whether it is this process's, alive, and was started with the variables that are read at start."""
        return self.lives() and self.key == _server_key()

    def lives(self) -> bool:
        """Return whether it is this process's, and alive."""
        return self._owner == os.getpid() and self._process.poll() is None

    def fork(self, fds: list[int]) -> None:
        """Ask for one more rank, given the descriptors that it is to have."""
        assert len(fds) == DESCRIPTORS
        socket.send_fds(self._control, [b"f"], fds)

    def drain(self) -> None:
        """Let the server end with the ranks that it has now, which another thread may wait for."""
        if not self.ranks:
            self.stop()
        with suppress(OSError):
            self._control.sendall(b"d")

    def stop(self) -> None:
        """End the server, and with it any rank that is left; it holds nothing that could be lost."""
        if self._owner == os.getpid():
            self._control.close()
            self._process.kill()
            self._process.wait(5)


_server: ForkServer | None = None
_drained: list[ForkServer] = []  # of earlier variables, which still have ranks
_server_lock = threading.RLock()


def warm_server() -> ForkServer:
    """Return the fork server of this process; start it where there is none, or one with stale variables."""
    global _server
    with _server_lock:
        if _server is None or not _server.usable():
            _register_hooks()
            if _server is not None:
                _server.drain()
                _drained.append(_server)
            _server = ForkServer()
        for each in [each for each in _drained if not each.lives()]:
            each.stop()
            _drained.remove(each)
        return _server


def stop_server() -> None:
    """End the fork server now rather than with this process; the next launch starts another."""
    global _server
    with _server_lock:
        for each in (*_drained, _server):
            if each is not None:
                each.stop()
        _server, _drained[:] = None, []


@functools.cache
def _register_hooks() -> None:
    os.register_at_fork(after_in_child=_let_go_in_fork)
    atexit.register(stop_server)


def _let_go_in_fork() -> None:
    """Drop a fork's copy of the socket: the server ends when its owner's is closed."""
    for each in (*_drained, _server):
        if each is not None:
            each._control.close()


def _server_key() -> tuple[object, ...]:
    """Return what a process reads once, at its start, so that a running server cannot take it over later."""
    prefixes = ("LD_", "PYTHON", "OMP_", "KMP_", "MKL_", "GOMP_", "OPENBLAS_", "TORCH", "PYTORCH", "MALLOC_")
    read = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    env = tuple(sorted(item for item in read.items() if not item[0].startswith("TORCHELASTIC")))
    return (sys.executable, *interpreter_flags(), env)
