"""Every strategy of the matrix behaves as the helpers of a hand-written loop need it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import pytest

from distwrap.errors import ConformanceError
from tests.conformance.base import check
from tests.conformance.behaviours import ALL
from tests.conformance.cells import CELLS, HEART, Cell


def parts() -> Iterator[Any]:
    """Yield each cell with its heart, and with the rest of what is asked of it, for a later tier of tests."""
    for cell in CELLS:
        asked = (set(cell.only) or ALL) - {*cell.lacks, *cell.fails}
        heart, rest = HEART & asked, asked - HEART
        later = [pytest.mark.nightly(row="products", why=cell.nightly or f"the heart of {cell.name}, and other cells")]
        of_heart = [pytest.mark.slow(cell.slow)] if cell.slow else []
        of_rest = later if cell.only else [pytest.mark.slow("some seventy behaviours")]
        yield pytest.param(cell, heart, marks=later if cell.nightly else of_heart, id=f"{cell.name}, the heart")
        if rest:
            yield pytest.param(cell, rest, marks=later if cell.nightly else of_rest, id=cell.name)
        for name in cell.fails:
            fails = pytest.mark.xfail(reason="half 2 of the house", raises=ConformanceError, strict=True)
            yield pytest.param(cell, [name], marks=[*of_rest, fails], id=f"{cell.name}, {name}")


@pytest.mark.timeout(400)  # a guard, of what takes some ten seconds
@pytest.mark.parametrize(("cell", "asked"), list(parts()))
def test_it_conforms(cell: Cell, asked: Collection[str]) -> None:
    """It passes every behaviour that is asked of it, but for those that it refuses by name."""
    check(cell.strategy, cell.nprocs, asked, cell.refuses)
