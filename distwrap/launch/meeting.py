"""Where the ranks of one machine meet: a file without a name, in the caller's memory.

No port is needed that somebody would have to pick, or that a stranger could connect to; no name is looked up, so a
slow name server delays nothing; and when the caller dies, nothing is left.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def place() -> Iterator[str]:
    """Hold the file for torch's FileStore, and yield the path under which this user's processes find it."""
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        fd = os.memfd_create("distwrap-store")
        try:
            yield f"/proc/{os.getpid()}/fd/{fd}"
        finally:
            os.close(fd)
        return
    with tempfile.TemporaryDirectory(prefix="distwrap-") as folder:  # readable by this user alone
        yield os.path.join(folder, "store")
