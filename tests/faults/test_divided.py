"""Faults in a divided model; in `make nightly` some of each strategy, and by `make faults-divided` all, under load."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.faults.asked import asked, check
from tests.faults.divided import run_divided
from tests.faults.divided_cells import NAMES, ODD, PLACES, DividedCell, all_cells, expected
from tests.slow import nightly

# A failure of each kind: an exception, one that is caught, a step that is one rank's, deaths, and a loop that waits.
HERE = [
    DividedCell("fsdp", "rank 1", "raise in a backward"),
    DividedCell("fsdp", "rank 1", "step alone"),
    DividedCell("zero1", "rank 0", "SIGKILL in a save"),
    DividedCell("tp", "rank 1", "catch and go on"),
    DividedCell("pipeline", "rank 0", "SIGKILL in a load of parts"),
    DividedCell("pipeline", "rank 1", "infinite loop"),
]
LATER = [
    DividedCell("fsdp", "rank 0", "evaluate alone"),
    DividedCell("hsdp", "rank 1", "SIGKILL in a block"),
    DividedCell("zero1", "rank 1", "raise before a step"),
    DividedCell("tp", "rank 0", "other batch"),
    DividedCell("fsdp+tp", "rank 0", "SIGKILL in a backward"),
    DividedCell("pipeline", "rank 0", "raise in a backward"),
    DividedCell("two pipelines", "rank 1", "infinite loop"),
]


def test_every_cell_has_an_expectation() -> None:
    """What is to be seen is known for each cell, and every strategy is tried here."""
    cells = list(all_cells())
    assert all(expected(cell).seconds <= 10 for cell in cells)
    assert {cell.fault for cell in cells} == {*PLACES, *ODD}
    assert {cell.strategy for cell in (*HERE, *LATER)} == set(NAMES)
    assert {*HERE, *LATER} <= set(cells)


@pytest.fixture(scope="module")
def runner() -> Iterator[subprocess.Popen[str]]:
    """A process that runs cells."""
    with asked(run_divided, DividedCell) as process:
        yield process


@pytest.mark.parametrize(
    "cell", [*HERE, *(nightly(cell, row="faults", why="failures of the same kinds") for cell in LATER)], ids=str
)
@pytest.mark.slow("one fault after the other in a divided model")
def test_a_fault(cell: DividedCell, runner: subprocess.Popen[str]) -> None:
    """The caller knows in time, by the right exception, with the rank and the first cause, and nothing is left."""
    check(cell, runner)
