"""DeepSpeed's engine behaves as the helpers of a hand-written loop need it."""

from __future__ import annotations

import pytest

from distwrap.strategies.deepspeed import DeepSpeedStrategy
from distwrap.testing import check_strategy
from tests.engines.deepspeed.cells import DTYPE, refuses
from tests.strategies.conformance import AGAIN


@pytest.mark.timeout(600)  # a guard, of what takes a minute
@pytest.mark.parametrize("nprocs", [2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_conforms(stage: int, nprocs: int) -> None:
    """Every stage on two ranks, and on three what depends on how tensors fall into shares."""
    strategy = DeepSpeedStrategy(stage=stage)
    only = None if nprocs == 2 else AGAIN
    refused = [name for name in refuses(stage) if only is None or name in only]
    check_strategy(strategy, nprocs, dtype=DTYPE, refuses=refused, only=only)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_conforms_with_offload(stage: int) -> None:
    """With what the engine offloads on the CPU; a window's gradients cannot be rescaled where they are offloaded."""
    refused = {*refuses(stage), "scale_loss_over_windows", "gradients_are_averaged"}
    only = {*AGAIN, "sgd_with_momentum", "clip_in_optimizer_step", *refused}
    check_strategy(DeepSpeedStrategy(stage=stage, offload="cpu"), dtype=DTYPE, refuses=refused & only, only=only)
