"""The models of a run, in the order in which they were wrapped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from weakref import ref

from distwrap.group.collective_guard import CollectiveGuard
from distwrap.group.world import RunPart, World

if TYPE_CHECKING:
    from distwrap.model.distributed import DistributedModel


class WrappedModels(RunPart):
    """Wrapped models of one run; they hold on to the process group, and let go of it when the run ends.

    Iterating yields those that somebody still holds, the same on every rank where all ranks hold the same.

    Attributes:
        count: how many models were wrapped, so that each has a name that is alike on every rank.
    """

    def __init__(self, world: World) -> None:
        self._models: list[ref[DistributedModel]] = []
        self._guard = world.part(CollectiveGuard)
        self.count = 0

    def __iter__(self) -> Iterator[DistributedModel]:
        return iter([model for held in self._models if (model := held()) is not None])

    def next_name(self) -> str:
        """Return the name of the model that is about to be wrapped."""
        self.count += 1
        return str(self.count)

    def add(self, model: DistributedModel) -> None:
        """Note a model that was wrapped just now."""
        self._models = [held for held in self._models if held() is not None] + [ref(model)]
        self._guard.watch(model)

    def close(self) -> None:
        """Let the models go on as bare ones, without the process group."""
        for model in self:
            model.release()
