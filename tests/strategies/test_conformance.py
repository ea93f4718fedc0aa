"""Every strategy of the matrix behaves as the helpers of a hand-written loop need it."""

from __future__ import annotations

import pytest

from distwrap.testing import check_strategy
from distwrap.testing.behaviours import BEHAVIOURS
from tests.limits import slow
from tests.strategies.conformance import CELLS, Cell


@pytest.mark.timeout(400)  # a guard, of what takes some ten seconds
@pytest.mark.parametrize(
    "cell", [slow(cell, why=cell.slow) if cell.slow else cell for cell in CELLS], ids=lambda cell: cell.name
)
def test_it_conforms(cell: Cell) -> None:
    """It passes every behaviour that is asked of it, but for those that it refuses by name."""
    asked = (set(cell.only) or BEHAVIOURS.keys()) - set(cell.lacks)
    check_strategy(cell.strategy, cell.nprocs, only=asked, refuses=cell.refuses)
