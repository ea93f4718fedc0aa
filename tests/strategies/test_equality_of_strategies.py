"""Every strategy trains to the weights of one process."""

from __future__ import annotations

import pytest

from distwrap.testing.conformance import check_behaviours
from tests.strategies.matrix import COMBINATIONS, ROWS, Row


@pytest.mark.slow("three epochs of each optimizer, kind of step and type")
@pytest.mark.timeout(400)  # a guard, of what takes some ten seconds
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_it_trains_as_one_process_does(row: Row) -> None:
    """After three epochs the weights are those of one process, by every optimizer, kind of step and type."""
    chosen = {name: each for name, each in COMBINATIONS.items() if not any(words in name for words in row.lacks)}
    refused = [name for name in chosen if any(words in name for words in row.refuses)]
    check_behaviours(chosen, row.strategy, row.nprocs, refuses=refused)
