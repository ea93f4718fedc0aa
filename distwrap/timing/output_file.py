"""The file for a report or a trace, which is tried before the run, and not only at its end."""

from __future__ import annotations

import os


def problem(path: str | os.PathLike[str]) -> str:
    """Make the folder of a file, and return why the file cannot be written; leave no new file behind.

    Returns:
        The end of a sentence, and what to do; empty where it can be written.

    Example:
        >>> problem("/dev/null/times.json")
        "cannot be written: [Errno 17] File exists: '/dev/null'. Name a file in a folder that can be written."
    """
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        is_new = not os.path.exists(path)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666))
        if is_new:
            os.remove(path)
    except OSError as error:
        return f"cannot be written: {error}. Name a file in a folder that can be written."
    return ""
