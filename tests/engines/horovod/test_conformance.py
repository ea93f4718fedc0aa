"""Gradients that Horovod averages behave as the helpers of a hand-written loop need it."""

from __future__ import annotations

import pytest

from distwrap.strategies.horovod import HorovodStrategy
from distwrap.testing import check_strategy
from tests.strategies.conformance import AGAIN


@pytest.mark.timeout(600)  # a guard, of what takes a minute
@pytest.mark.parametrize("nprocs", [2, 3])
def test_it_conforms(nprocs: int) -> None:
    """All on two ranks, in float64; on three what depends on how tensors fall into shares."""
    check_strategy(HorovodStrategy(), nprocs, only=None if nprocs == 2 else AGAIN)
