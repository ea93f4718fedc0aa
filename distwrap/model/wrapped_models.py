"""The models of a run, in the order in which they were wrapped."""

from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

from torch import nn

from distwrap.group.collective_guard import CollectiveGuard
from distwrap.group.world import RunPart, World


class WrappedModels(RunPart):
    """Wrapped models of one run; they hold on to the process group, and let go of it when the run ends.

    Iterating yields those that somebody still holds, the same on every rank where all ranks hold the same.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._models: list[ref[nn.Module]] = []
        self._guard = world.part(CollectiveGuard)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([model for held in self._models if (model := held()) is not None])

    @property
    def last(self) -> nn.Module | None:
        """The model that was wrapped last, of those that somebody still holds."""
        return next((model for held in reversed(self._models) if (model := held()) is not None), None)

    def holding(self, name: str) -> list[tuple[nn.Module, Any]]:
        """Return the models whose wrapper holds something under a name, each with what it holds."""
        return [(model, vars(model)[name]) for model in self if name in vars(model)]

    def add(self, model: nn.Module) -> None:
        """Note a model that was wrapped just now."""
        self._models = [held for held in self._models if held() is not None] + [ref(model)]
        self._guard.models.add(model)

    def close(self) -> None:
        """Let the models go on as bare ones, without the process group, unless that is the user's, which stays."""
        for model in self if self._world.group is not None else ():
            release: Callable[[nn.Module], None] = getattr(type(model), "release", lambda model: None)
            release(model)
