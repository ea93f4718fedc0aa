"""Processes that have lost their parent become children of pytest, so that each test sees what it leaves running.

Without this they would be init's, and nobody would look at them. Those that have ended meanwhile are reaped here, since
nobody else waits for them; children that this process has started itself are left to who waits for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_own: set[int] = set()


def adopt_orphans() -> None:
    """Be the parent of all orphans among what this process starts, and remember what it has started itself."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    import _posixsubprocess

    vars(subprocess)["_USE_POSIX_SPAWN"] = False  # which starts a process by none of these functions
    for module, name in (
        (os, "fork"),
        (os, "forkpty"),
        (_posixsubprocess, "fork_exec"),
        (subprocess, "_fork_exec"),  # since Python 3.11
    ):
        if name in vars(module):
            vars(module)[name] = _remembered(vars(module)[name])


def _remembered(start: Any) -> Any:
    def started(*args: Any) -> Any:
        result = start(*args)
        _own.add(result[0] if isinstance(result, tuple) else result)
        return result

    return started


def reaped(children: set[int]) -> set[int]:
    """Return these children, all that there are, without the orphans that have ended, which are waited for now."""
    _own.intersection_update(children)  # a number may come again
    return {each for each in children if each in _own or not _has_ended(each)}


def is_orphan(child: int) -> bool:
    """Return whether a child of this process was started by another."""
    return child not in _own


def lives(pid: int) -> bool:
    """Return whether a process has not ended; an orphan that has is waited for."""
    return not _has_ended(pid)


def kill_orphans(children: set[int]) -> None:
    """End those of these children that are orphans, of which nobody else takes care."""
    for child in filter(is_orphan, children):
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    if state == "Z" and is_orphan(pid):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return state == "Z"
