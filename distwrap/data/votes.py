"""Votes: numbers of which all ranks take the maximum, between their CPUs and apart from all other exchanges.

A rank that has left its loop casts its vote and waits for nobody: the others get it before their next step. At the end
of the function it waits: were the rank gone by then, its vote would be gone too.
"""

from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from distwrap.group.setup import require_group
from distwrap.group.world import World
from distwrap.supervision.activity import Activity


class Votes:
    """Votes of the ranks of a run; in a single process there is nobody to ask.

    Attributes:
        what: who asks for them, in words.
    """

    what: ClassVar[str]

    def __init__(self, world: World) -> None:
        self._place, self._activity = world.placement, world.part(Activity)
        self._pending: list[tuple[torch.Tensor, Any]] = []
        self._group: Any = None
        if self._place.world_size > 1:
            require_group(self.what)
            self._group = world.new_group(backend="gloo")

    def maximum(self, numbers: list[int], seconds: float | None = None) -> list[int]:
        """Return the largest of all ranks' numbers, place by place, and wait for them, at most for some seconds."""
        if self._group is None:
            return numbers
        vote, work = self._begin(numbers)
        work.wait(*([] if seconds is None else [timedelta(seconds=seconds)]))
        return vote.tolist()

    def cast(self, numbers: list[int]) -> None:
        """Begin a vote in which the other ranks take part later."""
        if self._group is not None and dist.is_initialized():
            left = [(vote, work) for vote, work in self._pending if not work.is_completed()]
            self._pending = [*left, self._begin(numbers)]

    def _begin(self, numbers: list[int]) -> tuple[torch.Tensor, Any]:
        self._activity.turns += 1
        vote = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        return vote, dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def gathered(self, numbers: list[int]) -> list[list[int]]:
        """Return the numbers of each rank."""
        if self._group is None:
            return [numbers]
        own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        everyone = [torch.zeros_like(own) for _ in range(self._place.world_size)]
        dist.all_gather(everyone, own, group=self._group)
        return [row.tolist() for row in everyone]

    def wait(self) -> None:
        """Wait until the other ranks have taken part in all of them."""
        while self._pending:
            self._pending.pop(0)[1].wait()
