"""Start the processes of the ranks: one class a launcher, one protocol.

Each process holds the far end of a connection. What it has to say comes through it, and when it closes the process
has ended, however that happened.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Protocol

from distwrap._internals.python import forget_exit_handlers, interpreter_flags
from distwrap.errors import LaunchError
from distwrap.launch.execute import Call
from distwrap.launch.logs import Streams
from distwrap.launch.server import DESCRIPTORS, STATUS


class Process(Protocol):
    """A rank's process, seen from the caller."""

    rank: int
    pid: int
    conn: Connection

    def exitcode(self, seconds: float) -> int | None:
        """Wait that long for the process to end: its exit code, minus the signal that killed it, or ``None``."""

    def close(self) -> None:
        """Give back what this end holds."""


def kill(process: Process, number: int, *, with_children: bool = True) -> None:
    """Send a signal to a rank, and to all that it started."""
    with contextlib.suppress(ProcessLookupError):
        try:
            (os.killpg if with_children else os.kill)(process.pid, number)
        except (ProcessLookupError, PermissionError):  # it has not made its own group yet
            os.kill(process.pid, number)


class ForkedProcess:
    """A copy of this process."""

    def __init__(self, rank: int, call: Call, earlier: Sequence[Process], streams: Streams | None = None) -> None:
        from distwrap.launch import worker

        self.rank = rank
        self.conn, theirs = Pipe()
        foreign = [self.conn, *(process.conn for process in earlier)]
        stdin = os.dup(_standard_streams()[0])

        def run() -> None:
            os.dup2(stdin, 0)  # multiprocessing has put /dev/null there
            os.close(stdin)
            sys.stdin = open(0, closefd=False)  # noqa: SIM115
            if streams is not None:
                os.dup2(streams[0], 1)
                os.dup2(streams[1], 2)
                # The caller's own may lead elsewhere, as in a notebook.
                sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
            for conn in foreign:
                conn.close()
            forget_exit_handlers()
            worker.leave(worker.work(theirs, call))

        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=run, name=f"distwrap-rank-{rank}")
        with warnings.catch_warnings():
            # Python >= 3.12 warns of any native thread; which ones matter was checked before.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        os.close(stdin)
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def exitcode(self, seconds: float) -> int | None:
        self._process.join(seconds)
        return self._process.exitcode

    def close(self) -> None:
        self.conn.close()
        if self._process.exitcode is not None:
            self._process.close()


class CommandProcess:
    """A fresh interpreter."""

    def __init__(
        self,
        rank: int,
        command: Callable[[int], list[str]],
        env: Mapping[str, str] | None = None,
        directory: str | None = None,
        streams: Streams | None = None,
    ) -> None:
        self.rank = rank
        self.conn, theirs = Pipe()
        fd = theirs.fileno()
        stdout, stderr = streams or (None, None)
        self._process = subprocess.Popen(
            command(fd), pass_fds=(fd,), env=env, cwd=directory, stdout=stdout, stderr=stderr, start_new_session=True
        )
        theirs.close()
        self.pid = self._process.pid

    def exitcode(self, seconds: float) -> int | None:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        self.conn.close()


class ServedProcess:
    """A fork of the warm server."""

    def __init__(self, rank: int, server: ForkServer, streams: Streams | None = None) -> None:
        self.rank = rank
        self.conn, theirs = Pipe()
        self._status, status = os.pipe()
        self._exitcode: int | None = None
        try:
            stdin, *own = _standard_streams()
            server.fork([stdin, *(streams or own), theirs.fileno(), status])
        finally:
            theirs.close()
            os.close(status)
        pid = self._read(server.start_seconds)
        if pid is None:
            self.close()
            raise LaunchError(
                f"the fork server (pid {server.pid}) ended before it started rank {rank}: "
                f"its own error, if any, is above. Use launcher='spawn' to start without it."
            )
        self.pid = pid

    def exitcode(self, seconds: float) -> int | None:
        if self._exitcode is None:
            code = self._read(seconds)
            # The server died before the rank: the kernel killed the rank with it.
            self._exitcode = -signal.SIGKILL if code is None and self._ended else code
        return self._exitcode

    def close(self) -> None:
        self.conn.close()
        if self._status >= 0:
            os.close(self._status)
            self._status = -1

    _ended = False

    def _read(self, seconds: float) -> int | None:
        if not multiprocessing.connection.wait([self._status], seconds):
            return None
        data = os.read(self._status, STATUS.size)
        self._ended = not data
        return int(STATUS.unpack(data)[0]) if data else None


class ForkServer:
    """Our end of the fork server."""

    start_seconds = 120.0  # importing torch from a cold network disk takes its time

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            _python(f"from distwrap.launch.server import main; main({theirs.fileno()})"),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._control = ours
        self._owner = os.getpid()
        self.pid = self._process.pid
        self.key = _server_key()

    def usable(self) -> bool:
        """Say whether it is ours, alive, and was started with the variables that are read at start."""
        return self._owner == os.getpid() and self._process.poll() is None and self.key == _server_key()

    def fork(self, fds: list[int]) -> None:
        """Ask for one more rank."""
        assert len(fds) == DESCRIPTORS
        socket.send_fds(self._control, [b"f"], fds)

    def forget(self) -> None:
        """Drop our copy of the socket, in a process that was forked and does not own the server."""
        self._control.close()

    def stop(self) -> None:
        """End the server, and with it any rank that is left; it holds nothing that could be lost."""
        self._control.close()
        self._process.kill()
        self._process.wait(5)


_server: ForkServer | None = None
_hooks_registered = False
_server_lock = threading.Lock()


def warm_server() -> ForkServer:
    """Return the fork server of this process; start it where there is none, or one with stale variables."""
    global _server, _hooks_registered
    with _server_lock:
        if _server is None or not _server.usable():
            if not _hooks_registered:
                os.register_at_fork(after_in_child=_forget_server)
                atexit.register(stop_server)
                _hooks_registered = True
            if _server is not None and _server._owner == os.getpid():
                _server.stop()
            _server = ForkServer()
        return _server


def server_is_warm() -> bool:
    """Say whether a launch from the fork server would find it running."""
    return _server is not None and _server.usable()


def stop_server() -> None:
    """End the fork server now rather than with this process; the next launch starts another."""
    global _server
    with _server_lock:
        if _server is not None and _server._owner == os.getpid():
            _server.stop()
        _server = None


def _forget_server() -> None:
    if _server is not None:
        _server.forget()


def spawn_command(fd: int) -> list[str]:
    """The command line of a fresh interpreter that becomes a rank."""
    return _python(f"from distwrap.launch.worker import spawned; spawned({fd})")


def _python(code: str) -> list[str]:
    """The command line of an interpreter like this one, which finds distwrap and torch where this one did."""
    path = [os.path.abspath(entry) for entry in sys.path if entry and os.path.isdir(entry)]
    return [sys.executable, *interpreter_flags(), "-c", f"import sys; sys.path[:0] = {path!r}; {code}"]


def _server_key() -> tuple[object, ...]:
    """What a process reads once, at its start, so that a running server could not take it over later."""
    prefixes = ("LD_", "PYTHON", "OMP_", "KMP_", "MKL_", "GOMP_", "OPENBLAS_", "TORCH", "PYTORCH", "MALLOC_")
    env = tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith(prefixes) and not _ours(k)))
    return (sys.executable, *interpreter_flags(), env)


def _ours(name: str) -> bool:
    return name.startswith("TORCHELASTIC")


def _standard_streams() -> list[int]:
    """Descriptors 0, 1 and 2 of this process as they are now; /dev/null where one is closed."""
    fds = []
    for number in range(3):
        try:
            os.fstat(number)
            fds.append(number)
        except OSError:
            fds.append(os.open(os.devnull, os.O_RDWR))
    return fds


__all__ = ["CommandProcess", "ForkServer", "ForkedProcess", "Process", "ServedProcess", "kill"]
