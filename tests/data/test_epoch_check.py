"""A rank that goes through a shuffled loader alone is told by name, and nobody waits for it."""

from __future__ import annotations

import gc
import time
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from distwrap import rank, shard_loader
from distwrap.data.epoch_check import _digest
from distwrap.errors import LoaderError
from distwrap.group.world import current_world
from distwrap.testing import run_ranks
from tests.limits import SOON


def train(peeks: str, shuffle: bool, epochs: int = 2, says_epoch: bool = False, n: int = 40) -> int:
    loader: Any = shard_loader(DataLoader(range(n), batch_size=2, shuffle=shuffle))  # type: ignore[arg-type]
    if peeks == "both" or (peeks == "zero" and rank() == 0) or (peeks == "one" and rank() == 1):
        next(iter(loader))
    steps = 0
    for epoch in range(epochs):
        if says_epoch:
            loader.set_epoch(epoch)
        for _ in loader:
            dist.all_reduce(torch.ones(1))  # as a training step
            steps += 1
    return steps


@pytest.mark.parametrize(("who", "number"), [("zero", 0), ("one", 1)])
def test_a_peek_on_one_rank(who: str, number: int) -> None:
    """The other rank is not trained on overlapping shares, but told who was alone, where, and what to do."""
    start = time.monotonic()
    message = (
        rf"rank {number} has taken 1 batch of epoch 0 of the loader sharded at "
        r"test_epoch_check\.py:\d+ and is in epoch 1"
    )
    with pytest.raises(LoaderError, match=message):
        run_ranks(train, 2, who, True, timeout=2 * SOON)
    assert time.monotonic() - start < SOON


@pytest.mark.parametrize(
    ("who", "shuffle", "says_epoch"),
    [("nobody", True, False), ("both", True, False), ("zero", False, False), ("zero", True, True)],
)
def test_no_harm(who: str, shuffle: bool, says_epoch: bool) -> None:
    """Nobody, or everybody, is alone; without a shuffle, and where the loop says its epochs, a peek changes nothing."""
    assert run_ranks(train, 2, who, shuffle, 2, says_epoch) == [20, 20]


def leaves_early() -> list[int]:
    loader: Any = shard_loader(DataLoader(range(64), batch_size=2, shuffle=True))  # type: ignore[arg-type]
    return [sum(1 for _ in islice(loader, 5)) for _ in range(4)]


def test_all_ranks_may_leave_early() -> None:
    """Epochs that end after the same step everywhere are in step, however far a rank is ahead."""
    assert run_ranks(leaves_early, 2) == [[5] * 4] * 2


@pytest.mark.filterwarnings("ignore:.*quant")
def test_batches_of_quantised_tensors_are_compared() -> None:
    one, other = (torch.quantize_per_tensor(torch.full((9,), value), 0.5, 0, torch.quint8) for value in (1.0, 2.0))
    assert _digest([one]) == _digest([one.clone()]) != _digest([other])


def makes_loaders_anew() -> tuple[list[str], list[bool]]:
    channel = current_world().channel
    assert channel is not None
    notifier = channel._notifier
    numbers = range(1, 31)
    for _ in numbers:
        for _ in shard_loader(DataLoader(range(4), shuffle=True)):  # type: ignore[arg-type]
            pass
    on_board = [name for name in notifier.board.read(rank()) if name.startswith("note/loader/")]
    notifier.is_held = False  # as between nodes
    for _ in numbers:
        for _ in shard_loader(DataLoader(range(4), shuffle=True)):  # type: ignore[arg-type]
            pass
    gc.collect()
    in_store = [notifier.store.check([f"note/loader/{number}/{rank()}"]) for number in range(1, 61)]
    notifier.is_held = True
    return on_board, in_store


def test_notes_of_loaders_that_are_gone() -> None:
    """A loop that makes a loader in each epoch leaves no note of each on the board, nor in the store."""
    for on_board, in_store in run_ranks(makes_loaders_anew, 2):
        assert 1 <= len(on_board) <= 2
        assert 1 <= sum(in_store) <= 2
