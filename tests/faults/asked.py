"""Cells that are run by a process of its own, a fork, which is asked for one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.forked_commands import PYTHON, forked_commands, own_commands

ROOT = Path(__file__).parent.parent.parent
LIMIT = 100.0

# It adopts the orphans of its cells, and forks.
CODE = """
import json, sys
from {module} import {run} as run
from {cells} import {cell} as Cell

if __name__ == "__main__":
    for line in sys.stdin:
        seen = run(Cell(*json.loads(line)), slack=4.0)  # here cores may be busy
        print(json.dumps([seen.wrong, seen.output]), flush=True)
"""


@contextmanager
def asked(run: Any, cell: type, *, forks: bool = True) -> Iterator[subprocess.Popen[str]]:
    """Start a process that runs cells of a class by a function, for the time of a ``with``.

    Args:
        run: the function.
        cell: the class.
        forks: whether interpreters that it starts are forks, whose parent is the interpreter of tests: a cell whose
            caller dies needs the caller itself.
    """
    code = CODE.format(module=run.__module__, run=run.__name__, cells=cell.__module__, cell=cell.__name__)
    commands, python = (forked_commands(), PYTHON) if forks else (own_commands(), sys.executable)
    env = {**os.environ, **commands, "PYTHONPATH": str(ROOT)}  # its ranks find this package too
    with subprocess.Popen(
        [python, "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(LIMIT)


def check(cell: Any, runner: subprocess.Popen[str]) -> None:
    """Run a cell there, and fail with its output where anything was wrong."""
    assert runner.stdin is not None
    assert runner.stdout is not None
    print(json.dumps(list(vars(cell).values())), file=runner.stdin, flush=True)
    wrong, output = json.loads(runner.stdout.readline())
    assert not wrong, "\n".join([*wrong, output])
