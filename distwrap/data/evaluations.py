"""Notice of an evaluation over shares of the data whose numbers the ranks have not put together."""

from collections.abc import Iterator
from typing import Any

import torch

from distwrap._internals.torch_groups import collectives_begun
from distwrap.group.world import RunPart, World, say_once
from distwrap.places import place
from distwrap.supervision.stacks import users_frame


class Evaluations(RunPart):
    """Whole passes over this rank's share of a loader, with gradients off, after which no collective has begun yet.

    A sum over such a pass is of this rank's samples alone, which nothing else shows: it is a number like any other. The
    pass is judged when training goes on, or when the function ends.
    """

    def __init__(self, world: World) -> None:
        self._size = world.placement.world_size
        self._ended: dict[str, int] = {}  # where, with the collectives begun by then

    def watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return batches of which a whole pass is noted where gradients are off; training ends what is noted."""
        if not torch.is_grad_enabled():
            return self._noting(batches, collectives_begun())
        self._judge()
        return batches

    def conclude(self) -> None:
        """Judge the last evaluation."""
        self._judge()

    def _noting(self, batches: Iterator[Any], begun: int | None) -> Iterator[Any]:
        frame = users_frame()
        yield from batches
        if frame is not None and begun is not None and begun == collectives_begun():
            self._ended[place(frame.f_code.co_filename, frame.f_lineno)] = begun

    def _judge(self) -> None:
        if not self._ended:
            return
        now = collectives_begun()
        for site, begun in self._ended.items():
            if begun == now:
                say_once(
                    f"evaluated alone {site}",
                    f"the evaluation at {site} went over each rank's share of a loader, and the ranks have exchanged "
                    f"nothing since. A loss or an accuracy from there is of one rank's samples alone, of {self._size}: "
                    "put mean(), reduce() or gather() around it. If each rank is meant to keep its own, all is well.",
                )
        self._ended.clear()
