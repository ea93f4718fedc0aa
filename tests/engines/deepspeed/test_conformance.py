"""DeepSpeed's engine behaves as the helpers of a hand-written loop need it."""

from __future__ import annotations

import pytest

from distwrap.strategies.deepspeed import DeepSpeedStrategy
from tests.conformance.base import check
from tests.conformance.behaviours import ALL
from tests.conformance.cells import AGAIN, GUESSED
from tests.engines.deepspeed.cells import DTYPE, refuses


@pytest.mark.timeout(600)  # a guard, of what takes a minute
@pytest.mark.parametrize("nprocs", [2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_conforms(stage: int, nprocs: int) -> None:
    """Every stage on two ranks, and on three what depends on how tensors fall into shares."""
    strategy = DeepSpeedStrategy(stage=stage)
    # An engine has the optimizer, and steps a copy of the weights; the loop of retrofit calls loss.backward().
    asked = {*(ALL if nprocs == 2 else AGAIN)} - {*GUESSED, "retrofit"}
    check(strategy, nprocs, asked, refuses(stage), DTYPE)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_conforms_with_offload(stage: int) -> None:
    """With what the engine offloads on the CPU; a window's gradients cannot be rescaled where they are offloaded."""
    refused = {*refuses(stage), "scale_loss_over_windows", "gradients_are_averaged"}
    only = {*AGAIN, "sgd_with_momentum", "clip_in_optimizer_step", *refused} - {"retrofit"}
    check(DeepSpeedStrategy(stage=stage, offload="cpu"), 2, only, refused, DTYPE)
