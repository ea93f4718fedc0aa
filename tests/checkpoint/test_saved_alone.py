"""A save under ``if rank() == 0`` of what all ranks hold together: an error that says where the others are, no hang."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import distwrap as dw
from distwrap.checkpoint import meeting
from distwrap.errors import CheckpointError
from distwrap.options import Options
from distwrap.testing.nets import examples, small
from distwrap.testing.ranks import launch_ranks
from tests.plans import TP
from tests.slow import nightly


def save_alone(folder: Path, io: str, goes_on: bool) -> None:
    """Save on rank 0 alone, while the other rank trains on or leaves."""
    meeting.STUCK_SECONDS = 1.0
    model = dw.wrap_model(small())
    optimizer = dw.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    x, y = examples(16)

    def step() -> None:
        dw.backward(model.loss(x, y))
        dw.optimizer_step(optimizer)
        optimizer.zero_grad()

    step()
    if dw.rank() == 0:
        dw.save({"model": model, "optimizer": optimizer}, folder / "a", io=io)
    if goes_on:
        step()


CASES = [("fsdp", "file", True), ("zero1", "sharded", False), ("pipeline", "file", True)]
OTHERS = [("zero1", "file", True), (TP, "file", True), ("fsdp", "sharded", False)]


@pytest.mark.parametrize(
    ("strategy", "io", "goes_on"),
    [*CASES, *(nightly(*case, row="products", why="fsdp, zero1 and pipeline") for case in OTHERS)],
)
@pytest.mark.slow("waits for a limit to pass")
def test_a_save_of_one_rank_is_an_error(strategy: str, io: str, goes_on: bool, tmp_path: Path) -> None:
    """Whether the other rank waits in its next step, or has left."""
    where = r"rank 1 is .*:\d+" if goes_on else "rank 1 has left"
    options = Options(timeout=30, returns="all", strategy=strategy)
    with pytest.raises(CheckpointError, match=where) as raised:
        launch_ranks(2, options, 60, save_alone, tmp_path, io, goes_on)
    assert "let every rank call save()" in str(raised.value)
    assert list(tmp_path.iterdir()) == []
