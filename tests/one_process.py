"""The comparison that most tests of numbers end in."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distwrap.testing import run_ranks


def assert_as_in_one_process(train: Callable[[], list[float]], nprocs: int = 2) -> None:
    """Run a training on one rank and on several, and hold what every rank returns to be the one rank's."""
    [expected] = run_ranks(train, 1)
    for found in run_ranks(train, nprocs):
        assert found == pytest.approx(expected, rel=0, abs=1e-12)
