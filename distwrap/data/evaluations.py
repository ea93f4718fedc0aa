"""Notices of passes over shares of the data whose numbers are not those of all samples."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from distwrap.group.world import RunPart, World, say_once
from distwrap.model.checks.optimizers import Optimizers
from distwrap.model.wrapped_models import WrappedModels
from distwrap.places import place
from distwrap.supervision.activity import Activity
from distwrap.supervision.stacks import users_frame


class _Pass(NamedTuple):
    """Whole pass over a share that has trained nothing.

    Attributes:
        exchanged: how many exchanges of numbers the rank had begun by its end.
        is_evaluation: whether it is one for sure, since gradients were off.
    """

    exchanged: int
    is_evaluation: bool


class Evaluations(RunPart):
    """Whole passes over this rank's share of a loader that train nothing, after which no collective has begun yet.

    A sum over such a pass is of this rank's samples alone, which nothing else shows: it is a number like any other. The
    pass is judged when training goes on, or when the function ends.
    """

    def __init__(self, world: World) -> None:
        self._size, self._optimizers = world.placement.world_size, world.part(Optimizers)
        self._models, self._activity = world.part(WrappedModels), world.part(Activity)
        self._ended: dict[str, _Pass] = {}  # by the line of the loop

    def watched(self, batches: Iterator[Any], repeated: int) -> Iterator[Any]:
        """Yield batches; note a whole pass that trains nothing, and judge those before where this one trains.

        Args:
            batches: of this rank's share.
            repeated: how many samples two ranks have, so that all shares are of one size.
        """
        frame, before, steps = users_frame(), self._activity.exchanged(), self._optimizers.steps
        for batch in batches:
            yield batch
            if self._ended and self._optimizers.steps > steps:
                self._judge(before)
        now, is_evaluation = self._activity.exchanged(), not torch.is_grad_enabled()
        if self._optimizers.steps > steps or frame is None:
            return
        site = place(frame.f_code.co_filename, frame.f_lineno)
        may_train = now != before  # by hand, without an optimizer
        if repeated and (is_evaluation or (self._trains and not may_train)):
            say_once(
                f"evaluated twice {site}",
                f"the loop at {site} trained nothing, and went over a loader in which {repeated} of the samples come "
                "twice, so that all ranks have equally many: a sum over all ranks counts them twice. For evaluations "
                'there is shard_loader(loader, mode="exact").',
            )
        if now is not None and not may_train:
            self._ended[site] = _Pass(now, is_evaluation)

    def conclude(self) -> None:
        """Judge the last passes; without a model, those with gradients on have looked at the data alone."""
        if not self._trains:
            self._ended = {site: each for site, each in self._ended.items() if each.is_evaluation}
        self._judge(self._activity.exchanged())

    @property
    def _trains(self) -> bool:
        return self._optimizers.steps > 0 or self._models.last is not None

    def _judge(self, now: int | None) -> None:
        for site, ended in self._ended.items():
            if ended.exchanged == now:
                say_once(
                    f"evaluated alone {site}",
                    f"the loop at {site} went over each rank's share of a loader and trained nothing, and the ranks "
                    "have exchanged nothing since. A loss or an accuracy from there is of one rank's samples alone, of "
                    f"{self._size}: put mean(), reduce() or gather() around it. If each rank is meant to keep its own, "
                    "all is well.",
                )
        self._ended.clear()
