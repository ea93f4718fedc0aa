"""Gradients that Horovod averages behave as the helpers of a hand-written loop need it."""

from __future__ import annotations

import pytest

from distwrap.strategies.horovod import HorovodStrategy
from tests.conformance.base import check
from tests.conformance.behaviours import ALL
from tests.conformance.cells import AGAIN


@pytest.mark.timeout(600)  # a guard, of what takes a minute
@pytest.mark.parametrize("nprocs", [2, 3])
def test_it_conforms(nprocs: int) -> None:
    """All on two ranks, in float64; on three what depends on how tensors fall into shares."""
    check(HorovodStrategy(), nprocs, ALL if nprocs == 2 else AGAIN)
