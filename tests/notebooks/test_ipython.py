"""In IPython at a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly(row="notebooks", why="test_jupyter.py::test_a_cell_is_launched")

LIMIT = 60
IPYTHON = [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor"]

LINES = """
import distwrap as dw
five = 5
@dw.distributed(nprocs=2, returns='all')
def main():
    return dw.rank(), five

main()
dw.distributed(nprocs=2)(lambda: dw.world_size() + five)()
%time dw.distributed(nprocs=2, launcher='spawn')(lambda: 'spawned')()
"""


def test_ipython(tmp_path: Path) -> None:
    """Functions and lambdas that were typed into IPython are launched, also by a magic."""
    done = subprocess.run(
        IPYTHON,
        input=LINES,
        cwd=tmp_path,
        env={**os.environ, "IPYTHONDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert "[(0, 5), (1, 5)]" in done.stdout, done.stdout + done.stderr
    assert ": 7\n" in done.stdout
    assert "'spawned'" in done.stdout


def test_a_fork_knows_the_cells(tmp_path: Path) -> None:
    """Forked ranks name the lines that were typed, without having been told of them."""
    lines = "\n".join(
        ["import distwrap as dw", "dw.distributed(nprocs=2, launcher='fork')(lambda: {}['missing'])()", ""]
    )
    done = subprocess.run(
        [*IPYTHON, "--HistoryManager.enabled=False"],  # its thread makes a fork unsafe
        input=lines,
        cwd=tmp_path,
        env={**os.environ, "IPYTHONDIR": str(tmp_path), "DISTWRAP_TRACEBACK": ""},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert "  cell 2, line 1, in <lambda>\n    dw.distributed(" in done.stdout, done.stdout + done.stderr
