"""Stand on a rank without processes: `shard_loader` reads nothing but the current world."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from distwrap.environments import Placement
from distwrap.group.world import World, activate, deactivate
from distwrap.options import Options

T = TypeVar("T")


@contextmanager
def standing_on(rank: int, world_size: int, *, seed: int | None = None) -> Iterator[World]:
    """Be a rank of a world of CPUs on one machine for the time of a ``with``."""
    place = Placement(rank, world_size, local_rank=rank, local_world_size=world_size, source="distwrap")
    world = World(place, torch.device("cpu"), options=Options(seed=seed))
    activate(world)
    try:
        yield world
    finally:
        deactivate()
        world.close()


def on_each_rank(world_size: int, do: Callable[[], T], *, seed: int | None = None) -> list[T]:
    """Do something on every rank, one after the other, and return the values in rank order."""
    values = []
    for rank in range(world_size):
        with standing_on(rank, world_size, seed=seed):
            values.append(do())
    return values


def batches(loader: DataLoader[Any]) -> list[list[int]]:
    """Run one epoch over a loader of numbers, and return its batches."""
    return [batch.tolist() for batch in loader]


def interleaved(shares: list[list[T]]) -> list[T]:
    """Put the shares back in the order they were dealt out in."""
    longest = max(map(len, shares))
    return [share[turn] for turn in range(longest) for share in shares if turn < len(share)]
