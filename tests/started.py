"""Each Python interpreter that tests start is noted in a file: most tests need none, and it imports torch for seconds.

Importing this file notes them in this process and in all forks of it. A fork is no start; nor are the commands of
`tests/commands`, which ask for one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

VARIABLE = "INTERPRETERS_OF_TESTS"  # the path of the file; processes that serve forks inherit it
_COMMANDS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "commands")


def count(path: str) -> int:
    """Return how many interpreters were started so far."""
    return os.path.getsize(path) if os.path.exists(path) else 0


def note_starts(path: str) -> None:
    """Write a byte to a file for each interpreter that this process or a fork of it starts."""

    def note(program: object) -> None:
        name = os.fsdecode(program) if isinstance(program, (str, bytes, os.PathLike)) else ""
        if os.path.basename(name).startswith(("python", "torchrun", "distwrap")) and not name.startswith(_COMMANDS):
            with open(path, "ab", buffering=0) as file:
                file.write(b".")

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        # Before Python 3.11 it calls the function that is replaced below.
        if event == "subprocess.Popen" and hasattr(subprocess, "_fork_exec"):
            program, words = arguments[0], arguments[1]
            note(program if program is not None else words[0])
        elif event in ("os.exec", "os.posix_spawn"):
            note(arguments[0])

    import _posixsubprocess

    fork_exec: Any = _posixsubprocess.fork_exec

    def spawned(words: Any, programs: Any, *rest: Any) -> Any:  # multiprocessing starts its processes without an event
        note(programs[0])
        return fork_exec(words, programs, *rest)

    sys.addaudithook(heard)
    vars(_posixsubprocess)["fork_exec"] = spawned


if VARIABLE in os.environ:
    note_starts(os.environ[VARIABLE])
