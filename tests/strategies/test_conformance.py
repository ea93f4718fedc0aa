"""Every strategy of the matrix behaves as the helpers of a hand-written loop need it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import pytest

from distwrap.testing import check_strategy
from distwrap.testing.behaviours import BEHAVIOURS
from tests.limits import heart_and_rest
from tests.strategies.conformance import CELLS, HEART, Cell


def parts() -> Iterator[Any]:
    """Yield each cell with what is asked of it."""
    for cell in CELLS:
        asked = (set(cell.only) or BEHAVIOURS.keys()) - set(cell.lacks)
        yield from heart_and_rest(cell.name, cell, asked, HEART, cell.slow, "some seventy behaviours")


@pytest.mark.timeout(400)  # a guard, of what takes some ten seconds
@pytest.mark.parametrize(("cell", "asked"), list(parts()))
def test_it_conforms(cell: Cell, asked: Collection[str]) -> None:
    """It passes every behaviour that is asked of it, but for those that it refuses by name."""
    check_strategy(cell.strategy, cell.nprocs, only=asked, refuses=cell.refuses)
