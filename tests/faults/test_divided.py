"""Some faults in divided models, of each strategy a few; `make faults-divided` runs all of them, under load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.divided_cells import NAMES, ODD, PLACES, DividedCell, all_cells, expected

ROOT = Path(__file__).parent.parent.parent
LIMIT = 100.0

# In a process of its own: it adopts the orphans of its cells, and forks.
SOME = """
import json, sys
from tests.faults.divided import run_divided
from tests.faults.divided_cells import DividedCell

if __name__ == "__main__":
    for line in sys.stdin:
        seen = run_divided(DividedCell(*json.loads(line)), slack=4.0)  # here cores may be busy
        print(json.dumps([seen.wrong, seen.output]), flush=True)
"""

QUICK = [
    DividedCell("fsdp", "rank 1", "raise in a backward"),
    DividedCell("fsdp", "rank 0", "evaluate alone"),
    DividedCell("fsdp", "rank 1", "step alone"),
    DividedCell("hsdp", "rank 1", "SIGKILL in a block"),
    DividedCell("zero2", "rank 0", "SIGKILL in a save"),
    DividedCell("zero2", "rank 1", "raise before a step"),
    DividedCell("tp", "rank 1", "catch and go on"),
    DividedCell("tp", "rank 0", "other batch"),
    DividedCell("fsdp+tp", "rank 0", "SIGKILL in a backward"),
    DividedCell("pipeline", "rank 0", "raise in a backward"),
    DividedCell("pipeline", "rank 0", "SIGKILL in a load of parts"),
    DividedCell("two pipelines", "rank 1", "infinite loop"),
]


def test_every_cell_has_an_expectation() -> None:
    """What is to be seen is known for each cell, and every strategy is tried here."""
    cells = list(all_cells())
    assert all(expected(cell).seconds <= 10 for cell in cells)
    assert {cell.fault for cell in cells} == {*PLACES, *ODD}
    assert {cell.strategy for cell in QUICK} == set(NAMES)
    assert set(QUICK) <= set(cells)


@pytest.fixture(scope="module")
def runner() -> Iterator[subprocess.Popen[str]]:
    """A process that runs cells."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", SOME], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.stdin.close()
        process.wait(LIMIT)


@pytest.mark.parametrize("cell", QUICK, ids=str)
def test_a_fault(cell: DividedCell, runner: subprocess.Popen[str]) -> None:
    """The caller knows in time, by the right exception, with the rank and the first cause, and nothing is left."""
    assert runner.stdin is not None
    assert runner.stdout is not None
    print(json.dumps(list(vars(cell).values())), file=runner.stdin, flush=True)
    wrong, output = json.loads(runner.stdout.readline())
    assert not wrong, "\n".join([*wrong, output])
