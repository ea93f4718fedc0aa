"""Files in memory, without a name on any disk: processes of this user open them by a path, and nobody else can."""

import os
import re

ARE_POSSIBLE = hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


def make(name: str) -> int:
    """Make a file, which exists as long as a process has it open, and return its descriptor."""
    fd = os.memfd_create(name)
    os.fchmod(fd, 0o600)
    return fd


def path_of(fd: int) -> str:
    """Return the path by which others open a file that this process has open."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def open_own(path: str, name: str) -> int:
    """Open a file that a process of this user's has made, by a path that anybody may have named.

    Args:
        path: of `path_of`.
        name: with which its name begins.

    Raises:
        OSError: it is gone, or is any other file.
    """
    if not re.fullmatch(r"/proc/\d+/fd/\d+", path):
        raise PermissionError(f"{path} is not a file in memory")
    fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    if os.fstat(fd).st_uid == os.geteuid() and os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{name}"):
        return fd
    os.close(fd)
    raise PermissionError(f"{path} is not {name} of this user's")
