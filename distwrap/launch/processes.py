"""The process of a rank, as its launcher sees it: something to signal and to wait for; and words for how it ended.

Each process holds the far end of a connection. Its reports come through the connection, and when that closes the
process has ended, however that happened. The kinds of processes are in the files of the launchers that start them.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe

from distwrap._internals.python import interpreter_flags
from distwrap.launch.logs import Streams

# For ranks that are fresh interpreters: a set of strings has one order on all of them.
ONE_HASH = {"PYTHONHASHSEED": "0"}

_HINTS = {
    signal.SIGKILL: "most likely because memory ran out, if nobody killed it by hand",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "most often a full /dev/shm",
    signal.SIGTERM: "somebody asked it to stop",
    signal.SIGABRT: "native code gave up, as gloo does when ranks call different collectives",
}


class Process:
    """A rank's process on this node.

    Attributes:
        rank: the rank.
        pid: its process id.
        conn: this end of the connection.
    """

    rank: int
    pid: int
    conn: Connection

    def signal(self, number: int, *, with_children: bool = True) -> None:
        """Send a signal to the process, and to all that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if with_children:
                os.killpg(self.pid, number)
                return
        with contextlib.suppress(ProcessLookupError):  # it has not made its own group yet, or has ended
            if self.exitcode(0) is None:  # else its number may be another's
                os.kill(self.pid, number)

    def exitcode(self, seconds: float) -> int | None:
        """Wait up to some seconds for the process to end.

        Returns:
            Its exit code, or minus the signal that ended it; ``None`` where it still runs.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close this end of the connection."""
        self.conn.close()


class CommandProcess(Process):
    """A command of its own, as a fresh interpreter.

    Args:
        rank: the rank.
        command: makes the command line, given the descriptor of the far end of the connection.
        env: its environment; by default this process's, and `ONE_HASH`.
        directory: its working directory; by default this process's.
        streams: its standard output and error; by default this process's.
    """

    def __init__(
        self,
        rank: int,
        command: Callable[[int], list[str]],
        env: Mapping[str, str] | None = None,
        directory: str | None = None,
        streams: Streams | None = None,
    ) -> None:
        self.rank = rank
        if env is None:
            env = {**ONE_HASH, **os.environ}
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


def python_command(code: str) -> list[str]:
    """Return the command line of an interpreter like this one, which finds distwrap and torch where this one did.

    It starts without garbage collection, which takes a sixth of the time of torch's import. When its own imports are
    done, `code` is to call ``gc.enable()``.
    """
    path = [os.path.abspath(entry) for entry in sys.path if entry and os.path.isdir(entry)]
    return [
        sys.executable,
        *interpreter_flags(),
        "-c",
        f"import gc, sys; gc.disable(); sys.path[:0] = {path!r}; {code}",
    ]


def standard_streams() -> list[int]:
    """Return descriptors 0, 1 and 2 of this process as they are now; /dev/null in place of one that is closed."""
    fds = []
    for number in range(3):
        try:
            os.fstat(number)
            fds.append(number)
        except OSError:
            fds.append(os.open(os.devnull, os.O_RDWR))
    return fds


def describe_exit(exitcode: int | None, oom_kills: int | None = None) -> str:
    """Return an exit code in words.

    Args:
        exitcode: exit code of the process, or minus the number of the signal that ended it.
        oom_kills: number of processes that the kernel killed during the run because memory ran out; ``None`` if the
            system does not count them.

    Example:
        >>> describe_exit(3)
        'exit code 3'
        >>> describe_exit(-9, oom_kills=1)
        'killed by SIGKILL (the kernel killed 1 process of this control group during the run because memory ran out)'
    """
    if exitcode is None:
        return "it still runs, but closed its connection"
    if exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        number = signal.Signals(-exitcode)
    except ValueError:
        return f"killed by signal {-exitcode}"
    hint = _HINTS.get(number)
    if number == signal.SIGKILL and oom_kills is not None:
        hint = (
            f"the kernel killed {oom_kills} process{'es' if oom_kills > 1 else ''} of this control group "
            "during the run because memory ran out"
            if oom_kills
            else "not because memory ran out, as the control group's count shows: somebody killed it"
        )
    if number == signal.SIGBUS:
        with contextlib.suppress(OSError):
            hint = f"most often a full /dev/shm: {shutil.disk_usage('/dev/shm').free >> 20} MiB are free now"
    return f"killed by {number.name}" + (f" ({hint})" if hint else "")


class OomCount:
    """Number of processes of this control group that the kernel has killed for want of memory since this was made.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files, ``memory.events``.
    """

    def __init__(self) -> None:
        self._before = _oom_kills()

    def __call__(self) -> int | None:
        """Return the count; ``None`` if the system does not count."""
        now = _oom_kills()
        return None if now is None or self._before is None else now - self._before


def _oom_kills() -> int | None:
    for path in _event_files():
        with contextlib.suppress(OSError, ValueError, KeyError), open(path) as events:
            return int(dict(line.split() for line in events)["oom_kill"])
    return None


def _event_files() -> list[str]:
    """Return the files in which the kernel counts: of control groups of version 2, then 1."""
    files = []
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as groups:
        for line in groups:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if not controllers:
                files.append(os.path.join("/sys/fs/cgroup", path.lstrip("/"), "memory.events"))
            elif "memory" in controllers.split(","):
                files.append(os.path.join("/sys/fs/cgroup/memory", path.lstrip("/"), "memory.oom_control"))
    # Inside a container the group's own files are at the top.
    return [*files, "/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"]
