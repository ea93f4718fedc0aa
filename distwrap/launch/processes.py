"""The process of a rank, as its launcher sees it: something to signal, to wait for, and to ask why it ended.

Each process holds the far end of a connection. Its reports come through the connection, and when that closes the
process has ended, however that happened. The kinds of processes are in the files of the launchers that start them.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe

from distwrap._internals.python import interpreter_flags
from distwrap.launch.exit_reason import describe_exit
from distwrap.launch.logs import Streams


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
        with contextlib.suppress(ProcessLookupError):
            try:
                (os.killpg if with_children else os.kill)(self.pid, number)
            except (ProcessLookupError, PermissionError):  # it has not made its own group yet
                os.kill(self.pid, number)

    def exitcode(self, seconds: float) -> int | None:
        """Wait that long for the process to end.

        Returns:
            Its exit code, or minus the signal that ended it; ``None`` where it still runs.
        """
        raise NotImplementedError

    def exit_reason(self, oom_kills: int | None = None) -> str:
        """Return in words why the process ended.

        Args:
            oom_kills: how often the kernel has killed for want of memory during the run, where it counts.
        """
        return describe_exit(self.exitcode(0), oom_kills)

    def close(self) -> None:
        """Give back what this end holds."""
        self.conn.close()


class CommandProcess(Process):
    """A command of its own, as a fresh interpreter.

    Args:
        rank: the rank.
        command: makes the command line, given the descriptor of the far end of the connection.
        env: its environment; by default this process's.
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
    """Return the command line of an interpreter like this one, which finds distwrap and torch where this one did."""
    path = [os.path.abspath(entry) for entry in sys.path if entry and os.path.isdir(entry)]
    return [sys.executable, *interpreter_flags(), "-c", f"import sys; sys.path[:0] = {path!r}; {code}"]


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
