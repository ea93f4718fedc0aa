"""Temporary folders whose owner is known by a lock, which the kernel lets go of however the owner ends.

A process number would not do: containers that share a folder for temporary files have the same numbers. The lock is on
the folder itself, which keeps systemd from tidying it up too.
"""

import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

_held: dict[Path, int] = {}  # the descriptor that holds the lock


def make(kind: str, place: str | None = None) -> Path:
    """Make a folder that only this user may read, and that is this process's until it ends or removes the folder.

    Args:
        kind: a word for what is in it, which tells it from others at `remove_abandoned`.
        place: the folder to make it in; by default that of temporary files.
    """
    _let_go_in_forks()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"distwrap-{kind}-", dir=place))
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            taken = _lock(fd) is not False  # where the file system has no locks, nobody else can have one either
            if taken and folder.exists():  # else it was taken for an abandoned one, before it had its lock
                _held[folder] = fd
                return folder
            os.close(fd)


def remove(folder: Path) -> None:
    """Remove a folder that this process has made; a no-op in a fork of it."""
    fd = _held.pop(folder, None)
    if fd is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


def remove_abandoned(
    kind: str, first: Callable[[Path], object] = lambda folder: None, place: str | None = None
) -> None:
    """Remove this user's folders of a kind whose owners are gone.

    Args:
        kind: as at `make`.
        first: called with each before it is removed.
        place: as at `make`.
    """
    for folder in Path(place or tempfile.gettempdir()).glob(f"distwrap-{kind}-*"):
        with contextlib.suppress(OSError):  # another user's, a link, or already gone
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(fd).st_uid == os.geteuid() and _lock(fd):
                    first(folder)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(fd)


def _lock(fd: int) -> bool | None:
    """Return whether the lock is ours now; ``None`` where the file system has none, as NFS for a folder."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@functools.cache
def _let_go_in_forks() -> None:
    os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    """Leave the locks to the process that was forked: a worker that outlives it would hold them on."""
    for fd in _held.values():
        os.close(fd)
    _held.clear()
