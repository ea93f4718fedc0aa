"""Votes of a rank that has left its loop: the others get them before their next step, and it does not wait.

At the end of the function it does: were the rank gone by then, its vote would be gone too.
"""

from typing import Any

import torch
import torch.distributed as dist


class Votes:
    """All-reduces that this rank has begun, and has not waited for."""

    def __init__(self) -> None:
        self._pending: list[tuple[torch.Tensor, Any]] = []

    def cast(self, vote: torch.Tensor, group: Any) -> None:
        """Begin an all-reduce by the maximum, in which the other ranks take part later."""
        work = dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=group, async_op=True)
        self._pending = [(kept, at) for kept, at in self._pending if not at.is_completed()] + [(vote, work)]

    def wait(self) -> None:
        """Wait until the other ranks have taken part in all of them."""
        while self._pending:
            self._pending.pop(0)[1].wait()
