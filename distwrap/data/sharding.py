"""Decisions about a sharded loader, which its samplers and its iterators share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from distwrap.data.indices import repeated
from distwrap.data.position import Position
from distwrap.data.samplers import Order, Share

if TYPE_CHECKING:
    from distwrap.data.dispatch import Dispatch
    from distwrap.data.epoch_check import EpochCheck
    from distwrap.data.lockstep import Lockstep


@dataclass
class Sharding:
    """Decisions about a sharded loader, and the loop's position in it.

    Attributes:
        device: where the batches go.
        rank: the rank whose share this is.
        world_size: how many ranks there are.
        copy_ahead: whether batches go to the device a step ahead.
        position: where the loop is.
        sampler: takes the share; ``None`` in a single process, and where there are no indices.
        items_per_step: how many of the sampler's items all ranks take in a step.
        uneven: how ranks with an iterable dataset end; empty where each ends by itself.
        lockstep: the loop in step with the other ranks, where they may end unevenly.
        dispatch: how one rank reads an iterable dataset for all, if it does.
        by_itself: whether an iterable dataset takes its rank's part by itself.
        seed: of the random numbers with which samples are fetched.
        order_seed: of those with which an iterable dataset makes the items that are divided, alike on all ranks.
        endless: whether the user's class goes on over one iterator for ever, and this one has epochs in its place.
        epoch_check: of the ranks' loops.
        epoch: the epoch that begins, int64; in shared memory where workers outlive an epoch.
        same: whether all ranks get all of the data on purpose.
        own_state: the loop's position as the dataset or loader tells it, or why it could not, while that is ahead.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    copy_ahead: bool = False
    position: Position = field(default_factory=Position)
    sampler: Order | Share | None = None
    items_per_step: int = 1
    uneven: Literal["", "shortest", "pad"] = ""
    lockstep: Lockstep[Any] | None = None
    dispatch: Dispatch | None = None
    by_itself: bool = False
    seed: int = 0
    order_seed: int = 0
    endless: bool = False
    epoch_check: EpochCheck | None = None
    epoch: torch.Tensor | None = None
    same: bool = False
    own_state: dict[str, Any] | Exception | None = None

    @property
    def repeated(self) -> int:
        """The number of samples of an epoch that two ranks have, so that all shares are of one size."""
        if not isinstance(self.sampler, Order) or self.sampler.mode != "pad":
            return 0
        return repeated(self.sampler.items, self.world_size)
