"""One pass through a loader whose ranks may change in it: each step's batch is of this rank's share at that moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from distwrap.data.position import fetching_ahead, move
from distwrap.group.members import Members
from distwrap.group.world import current_world

if TYPE_CHECKING:
    from distwrap.data.sharded import ShardedLoader


@dataclass
class Changing:
    """Changes of a loader when the members of its run change.

    Attributes:
        members: the members of the run.
        number: the loader's number among those of the run.
        remake: a function that makes the loader for a rank and a number of ranks.
        is_running: whether a pass through the loader is going on.
    """

    members: Members
    number: int
    remake: Callable[[int, int], Any]
    is_running: bool = False

    def batches(self, loader: ShardedLoader[Any]) -> Iterator[Any]:
        """Yield the batches of a pass; what the members have gone through together is not given again."""
        members, number = self.members, self.number
        if members.begin_pass(number) and torch.is_grad_enabled():
            return
        # One that was left in the middle is over. (A pass without gradients, as of an evaluation, is not skipped: the
        # loop may divide by what it has counted in it, before it gets what the others have found.)
        loader._sharding.position.now = None
        self.is_running, was_left = True, True
        try:
            nothing, arrangement, batches = object(), members.arrangement, None
            while True:
                if batches is None or arrangement != members.arrangement:
                    arrangement = members.arrangement
                    self._take_share(loader)
                    batches = loader._rank_batches()
                with fetching_ahead() as moves:
                    batch = next(batches, nothing)
                if batch is not nothing and torch.is_grad_enabled():
                    members.begin_batch(number)
                    if arrangement != members.arrangement:
                        continue  # the batch is of another share
                move(*moves)
                if batch is nothing:
                    was_left = False
                    if torch.is_grad_enabled():
                        members.end_batches()
                    return
                yield batch
        finally:
            self.is_running = False
            members.end_pass(number, was_left=was_left)

    def _take_share(self, loader: ShardedLoader[Any]) -> None:
        """Let a loader go on at its position with this rank's share among the members of now."""
        sharding, layout, state = loader._sharding, current_world().layout, loader.state_dict()
        if (sharding.rank, sharding.world_size) != (layout.rank, layout.size):
            other = self.remake(layout.rank, layout.size)
            other._sharding.changing = self
            loader.__dict__.update(other.__dict__)
        loader.load_state_dict(state)


def start_of_next(loader: ShardedLoader[Any]) -> dict[str, Any]:
    """Return a loader's position, for a rank that comes in now: of a pass that was left in the middle, the next one."""
    position, changing = loader._sharding.position, loader._sharding.changing
    now = position.now
    if changing is not None and not changing.is_running:
        position.now = None
    try:
        return loader.state_dict()
    finally:
        position.now = now
