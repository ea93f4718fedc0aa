"""A tenth of the fault matrix, which touches every row and column; `make faults` runs all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cells import FAULTS, LAUNCHERS, WHEN, WHO, Cell, all_cells, expected, meaningless, tenth

ROOT = Path(__file__).parent.parent.parent
CELLS = [cell for cell in all_cells() if not meaningless(cell)]
TENTH = tenth(CELLS)
LIMIT = 100.0

# In a process of its own: it adopts the orphans of its cells, and forks.
ONE = """
import json, sys
from tests.faults.cells import Cell
from tests.faults.one_cell import run

if __name__ == "__main__":
    for line in sys.stdin:
        seen = run(Cell(*json.loads(line)), slack=4.0)  # `make faults` measures; here cores may be busy
        print(json.dumps([seen.wrong, seen.output]), flush=True)
"""


def test_the_tenth_touches_everything() -> None:
    """Every launcher, culprit, fault and moment is in it, and most pairs that there are."""
    assert 0.09 < len(TENTH) / len(CELLS) < 0.11
    for index, values in enumerate((LAUNCHERS, WHO, FAULTS, WHEN)):
        assert {list(vars(cell).values())[index] for cell in TENTH} == set(values)

    def pairs(cells: list[Cell]) -> set[tuple[str, str]]:
        return {(a, b) for cell in cells for a in vars(cell).values() for b in vars(cell).values() if a < b}

    assert len(pairs(TENTH)) > 0.9 * len(pairs(CELLS))


def test_every_cell_has_an_expectation() -> None:
    """What is to be seen is known for each cell, and what is left out has a reason."""
    assert all(expected(cell).seconds <= 10 for cell in CELLS)
    assert len(CELLS) > 700


@pytest.fixture(scope="module")
def runner() -> Iterator[subprocess.Popen[str]]:
    """A process that runs cells."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}  # its ranks find this package too
    with subprocess.Popen(
        [sys.executable, "-c", ONE], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.stdin.close()
        process.wait(LIMIT)


@pytest.mark.slow("72 programs that fail, most of them interpreters of their own")
@pytest.mark.parametrize("cell", TENTH, ids=str)
def test_a_cell(cell: Cell, runner: subprocess.Popen[str]) -> None:
    """The caller knows in time, by the right exception or exit code, with the first cause, and nothing is left."""
    assert runner.stdin is not None
    assert runner.stdout is not None
    print(json.dumps(list(vars(cell).values())), file=runner.stdin, flush=True)
    wrong, output = json.loads(runner.stdout.readline())
    assert not wrong, "\n".join([*wrong, output])
