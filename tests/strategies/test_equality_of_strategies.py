"""Every strategy trains to the weights of one process."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import pytest

from distwrap.testing.conformance import check_behaviours
from tests.limits import heart_and_rest
from tests.strategies.matrix import COMBINATIONS, HEART, ROWS, Row


def parts() -> Iterator[Any]:
    """Yield each row with its combinations."""
    for row in ROWS:
        asked = {name for name in COMBINATIONS if not any(words in name for words in row.lacks)}
        yield from heart_and_rest(row.name, row, asked, HEART, row.slow, "twenty combinations")


@pytest.mark.timeout(400)  # a guard, of what takes some ten seconds
@pytest.mark.parametrize(("row", "asked"), list(parts()))
def test_it_trains_as_one_process_does(row: Row, asked: Collection[str]) -> None:
    """After three epochs the weights are those of one process, by every optimizer, kind of step and type."""
    chosen = {name: each for name, each in COMBINATIONS.items() if name in asked}
    refused = [name for name in chosen if any(words in name for words in row.refuses)]
    check_behaviours(chosen, row.strategy, row.nprocs, refuses=refused)
