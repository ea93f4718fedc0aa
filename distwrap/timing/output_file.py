"""The file that a report or a trace is to go to: tried before the run, and not when all is done."""

from __future__ import annotations

import os


def prepare(path: str | os.PathLike[str]) -> None:
    """Make the folder of a file, and check that the file can be written; none is left where there was none.

    Raises:
        OSError: it cannot.

    Example:
        >>> prepare("/dev/null/times.json")
        Traceback (most recent call last):
        FileExistsError: [Errno 17] File exists: '/dev/null'
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    is_new = not os.path.exists(path)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666))
    if is_new:
        os.remove(path)
