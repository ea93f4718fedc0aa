"""Notice of an evaluation over shares of the data whose numbers the ranks have not put together."""

from collections.abc import Iterator
from typing import Any

import torch

from distwrap._internals.torch_groups import collectives_begun
from distwrap.group.world import RunPart, World, say_once
from distwrap.model.optimizers import Optimizers
from distwrap.model.wrapped_models import WrappedModels
from distwrap.places import place
from distwrap.supervision.stacks import users_frame


class Evaluations(RunPart):
    """Whole passes over this rank's share of a loader that train nothing, after which no collective has begun yet.

    A sum over such a pass is of this rank's samples alone, which nothing else shows: it is a number like any other. The
    pass is judged when training goes on, or when the function ends.
    """

    def __init__(self, world: World) -> None:
        self._size, self._optimizers = world.placement.world_size, world.part(Optimizers)
        self._models = world.part(WrappedModels)
        self._ended: dict[str, int] = {}  # where, with the collectives begun by then

    def watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return batches of which a whole pass is noted where it trains nothing; training ends what is noted."""
        if torch.is_grad_enabled() and self._models.last is None:
            return batches  # before there is anything to train or to evaluate
        return self._noting(batches)

    def conclude(self) -> None:
        """Judge the last evaluation."""
        self._judge(collectives_begun())

    def _noting(self, batches: Iterator[Any]) -> Iterator[Any]:
        frame, begun, steps = users_frame(), collectives_begun(), self._optimizers.steps
        for batch in batches:
            yield batch
            if self._ended and self._optimizers.steps > steps:
                self._judge(begun)
        trained = self._optimizers.steps > steps
        if not trained and frame is not None and begun is not None and begun == collectives_begun():
            self._ended[place(frame.f_code.co_filename, frame.f_lineno)] = begun

    def _judge(self, now: int | None) -> None:
        for site, begun in self._ended.items():
            if begun == now:
                say_once(
                    f"evaluated alone {site}",
                    f"the loop at {site} went over each rank's share of a loader and trained nothing, and the ranks "
                    "have exchanged nothing since. A loss or an accuracy from there is of one rank's samples alone, of "
                    f"{self._size}: put mean(), reduce() or gather() around it. If each rank is meant to keep its own, "
                    "all is well.",
                )
        self._ended.clear()
