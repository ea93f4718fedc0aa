"""Strategies on accelerators: the conformance suite, in float64 against one process."""

from __future__ import annotations

import pytest

from distwrap.testing import check_strategy


@pytest.mark.gpu(2, 4)
@pytest.mark.timeout(400)  # a guard, of what takes some ten seconds
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_it_conforms(strategy: str, devices: int) -> None:
    """It passes every behaviour."""
    check_strategy(strategy, devices)
