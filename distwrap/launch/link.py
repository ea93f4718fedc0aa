"""A rank's link to its launcher: how the assignment comes in, how the outcome goes home, what ties the rank's life."""

import ctypes
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from typing import Protocol

from distwrap.launch.outcome import Outcome
from distwrap.launch.task import Assignment


class LauncherLink(Protocol):
    """A rank's end of the link to its launcher.

    A launcher whose ranks are another program's children brings a link of its own; `PipeLink` is that of ours.
    """

    def tie(self) -> None:
        """Prepare this process as a rank, first of all: tie its life to the launcher's, where nobody else does."""

    def assignment(self) -> Assignment:
        """Wait for this rank's instructions.

        Raises:
            EOFError: the launcher is gone.
        """

    def report(self, outcome: Outcome) -> None:
        """Bring home how this rank has ended; called once, perhaps from another thread than the main one."""


class PipeLink:
    """The link of a rank that is a process of this node's, and whose launcher holds the other end of a pipe."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn

    def tie(self) -> None:
        tie_to_parent()
        os.register_at_fork(after_in_child=self._conn.close)  # the launcher takes its end for the end of the rank

    def assignment(self) -> Assignment:
        assignment: Assignment = pickle.loads(self._conn.recv_bytes())
        return assignment

    def report(self, outcome: Outcome) -> None:
        self._conn.send(outcome)


def tie_to_parent() -> None:
    """Tie this process's life to its parent's, and make it stoppable together with all that it starts."""
    if sys.platform == "linux":  # the kernel then kills it also where it is stuck in native code
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getpgrp() != os.getpid():
        os.setsid()  # a Ctrl-C reaches the caller alone
