"""A tenth of the fault matrix, which touches every row and column, and what of it is for `make test-all`.

`make faults` runs all of it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.faults.asked import asked, check
from tests.faults.cells import FAULTS, LAUNCHERS, WHEN, WHO, Cell, all_cells, expected, meaningless, tenth
from tests.faults.one_cell import run
from tests.slow import exhaustive


def _first(cells: list[Cell]) -> tuple[list[Cell], list[Cell]]:
    """Return a quarter of the cells, with each later one that has what none before it has, and the others."""
    seen: set[str] = set()
    parts: tuple[list[Cell], list[Cell]] = ([], [])
    for number, cell in enumerate(cells):
        parts[number >= len(cells) // 4 and seen.issuperset(vars(cell).values())].append(cell)
        seen.update(vars(cell).values())
    return parts


CELLS = [cell for cell in all_cells() if not meaningless(cell)]
TENTH = tenth(CELLS)  # the cells that touch most come first
FIRST, LATER = _first(TENTH)


def test_the_tenth_touches_everything() -> None:
    """Every launcher, culprit, fault and moment is in the part for `make test-all`, and in the tenth most pairs."""
    assert 0.09 < len(TENTH) / len(CELLS) < 0.11
    for index, values in enumerate((LAUNCHERS, WHO, FAULTS, WHEN)):
        assert {list(vars(cell).values())[index] for cell in FIRST} == set(values)

    def pairs(cells: list[Cell]) -> set[tuple[str, str]]:
        return {(a, b) for cell in cells for a in vars(cell).values() for b in vars(cell).values() if a < b}

    assert len(pairs(TENTH)) > 0.9 * len(pairs(CELLS))
    assert len(pairs(FIRST)) > 0.5 * len(pairs(CELLS))


def test_every_cell_has_an_expectation() -> None:
    """What is to be seen is known for each cell, and what is left out has a reason."""
    assert all(expected(cell).seconds <= 10 for cell in CELLS)
    assert len(CELLS) > 700


@pytest.fixture(scope="module")
def runner() -> Iterator[subprocess.Popen[str]]:
    """A process that runs cells."""
    with asked(run, Cell) as process:
        yield process


@pytest.mark.slow("programs that fail, most of them interpreters of their own")
@pytest.mark.parametrize(
    "cell", [*FIRST, *(exhaustive(cell, why="more pairs of a fault and a launcher") for cell in LATER)], ids=str
)
def test_a_cell(cell: Cell, runner: subprocess.Popen[str]) -> None:
    """The caller knows in time, by the right exception or exit code, with the first cause, and nothing is left."""
    check(cell, runner)
