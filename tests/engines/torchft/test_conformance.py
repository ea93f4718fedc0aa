"""Ranks that may be lost behave, as long as none is, as the helpers of a hand-written loop need it."""

from __future__ import annotations

import pytest

from distwrap.strategies.torchft import TorchFTStrategy
from distwrap.testing import check_strategy
from tests.strategies.conformance import AGAIN

# A step may be undone, but neither a closure that an optimizer calls within it, nor what a scaler has learnt from it.
REFUSES = ("lbfgs", "fp16", "fp16_overflow", "fp16_clip")


@pytest.mark.timeout(600)  # a guard, of what takes a minute
@pytest.mark.parametrize("nprocs", [2, 3])
def test_it_conforms(nprocs: int) -> None:
    """All on two ranks, in float64; on three what depends on how tensors fall into shares."""
    check_strategy(TorchFTStrategy(come_back=False), nprocs, only=None if nprocs == 2 else AGAIN, refuses=REFUSES)
