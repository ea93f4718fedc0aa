"""Each fault once, by turns under each launcher; a tenth of the matrix in `make nightly`, and all by `make faults`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.faults.asked import asked, check
from tests.faults.cells import FAULTS, LAUNCHERS, WHEN, WHO, Cell, all_cells, expected, meaningless, tenth
from tests.faults.one_cell import run
from tests.slow import nightly

# Each fault, culprit and moment, and each launcher twice.
HERE = [
    Cell("fork", "rank 1", "raise", "in a step"),
    Cell("fork", "caller", "SIGTERM", "in a step"),
    Cell("forkserver", "rank 0", "raise while others compute", "before the first step"),
    Cell("forkserver", "rank 1", "SIGKILL", "in a loader worker"),
    Cell("forkserver", "rank 1", "full disk", "before the first step"),
    Cell("spawn", "rank 1", "unpicklable exception", "in a step"),
    Cell("spawn", "rank 0", "os._exit(3)", "in teardown"),
    Cell("script", "rank 0", "Ctrl-C", "in a step"),
    Cell("script", "rank 1", "failing __del__", "in a step"),
    Cell("elastic", "rank 1", "SIGSEGV", "in a step"),
    Cell("elastic", "rank 0", "exception while unpickling", "before the first step"),
    Cell("torchrun", "rank 1", "sys.exit(3)", "in a step"),
    Cell("torchrun", "rank 0", "infinite loop", "before setup"),
]
CELLS = [cell for cell in all_cells() if not meaningless(cell)]
LATER = [cell for cell in tenth(CELLS) if cell not in HERE]


def test_the_cells_touch_everything() -> None:
    """Every launcher, culprit, fault and moment is in the part for `make test-all`, and in the tenth most pairs."""
    assert set(HERE) <= set(CELLS)
    for index, values in enumerate((LAUNCHERS, WHO, FAULTS, WHEN)):
        assert {list(vars(cell).values())[index] for cell in HERE} == set(values)

    def pairs(cells: list[Cell]) -> set[tuple[str, str]]:
        return {(a, b) for cell in cells for a in vars(cell).values() for b in vars(cell).values() if a < b}

    assert len(pairs([*HERE, *LATER])) > 0.9 * len(pairs(CELLS))


def test_every_cell_has_an_expectation() -> None:
    """What is to be seen is known for each cell, and what is left out has a reason."""
    assert all(expected(cell).seconds <= 10 for cell in CELLS)
    assert len(CELLS) > 700


@pytest.fixture(scope="module")
def runner(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A process that runs cells, of which each starts forks, or interpreters of its own."""
    with asked(run, Cell, forks=request.param == "forks") as process:
        yield process


@pytest.mark.slow("programs that fail")
@pytest.mark.parametrize(
    ("runner", "cell"),
    [
        *(("forks", cell) for cell in HERE),
        *(nightly("processes", cell, row="faults", why="the fault, and the launcher") for cell in LATER),
    ],
    indirect=["runner"],
    ids=str,
)
def test_a_cell(cell: Cell, runner: subprocess.Popen[str]) -> None:
    """The caller knows in time, by the right exception or exit code, with the first cause, and nothing is left."""
    check(cell, runner)
