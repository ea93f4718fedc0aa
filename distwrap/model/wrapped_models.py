"""The models of a run in the order in which they were wrapped, and the strategy of each model and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from distwrap._internals.torch import compiled_module
from distwrap.group.collective_guard import CollectiveGuard
from distwrap.group.world import RunPart, World, current_world

if TYPE_CHECKING:
    from distwrap.model.gradients import Gradients
    from distwrap.strategies.base import Strategy

_MARK = "_distwrap_strategy"


class WrappedModels(RunPart):
    """Wrapped models of one run; they hold on to the process group, and let go of it when the run ends.

    Iterating yields those that somebody still holds, the same on every rank where all ranks hold the same.

    Attributes:
        gradients: the watch over the gradients of each model under DDP.
        optimizers: the strategies of optimizers, which may be the caller's own, and outlive the run.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._models: list[ref[nn.Module]] = []
        self._guard = world.part(CollectiveGuard)
        self.gradients: WeakKeyDictionary[nn.Module, Gradients] = WeakKeyDictionary()
        self.optimizers: WeakKeyDictionary[Optimizer, Strategy] = WeakKeyDictionary()

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([model for held in self._models if (model := held()) is not None])

    @property
    def last(self) -> nn.Module | None:
        """The model that was wrapped last, of those that somebody still holds."""
        return next((model for held in reversed(self._models) if (model := held()) is not None), None)

    def of_optimizer(self, optimizer: Optimizer) -> list[nn.Module]:
        """Return the models that have parameters of an optimizer."""
        held = parameters_of(optimizer).keys()
        return [model for model in self if not held.isdisjoint(map(id, model.parameters()))]

    def add(self, model: nn.Module) -> None:
        """Note a model that was wrapped just now."""
        self._models = [held for held in self._models if held() is not None] + [ref(model)]
        self._guard.models.add(model)

    def close(self) -> None:
        """Let the models go on as bare ones, without the process group, unless that is the user's, which stays."""
        for model in self if self._world.group is not None else ():
            release: Callable[[nn.Module], None] = getattr(type(model), "release", lambda model: None)
            release(model)


def bind(thing: nn.Module | Optimizer, strategy: Strategy) -> None:
    """Mark a wrapped model, or an optimizer in this run, with its strategy; a copy or a pickle carries no mark."""
    if isinstance(thing, Optimizer):
        current_world().part(WrappedModels).optimizers[thing] = strategy
    else:
        thing.__dict__[_MARK] = strategy


def bound_strategy(thing: Any) -> Strategy | None:
    """Return the strategy of a wrapped model or an optimizer; ``None`` where there is none.

    It is also found where a wrapped model was compiled around its wrapper.
    """
    if isinstance(thing, Optimizer):
        return current_world().part(WrappedModels).optimizers.get(thing)
    while thing is not None and _MARK not in getattr(thing, "__dict__", {}):
        thing = compiled_module(thing)
    return None if thing is None else thing.__dict__[_MARK]


def strategy_of_model(model: nn.Module | None, world: World) -> Strategy:
    """Return the strategy that prepared a model; the run's for one that none has prepared, and where there is none."""
    found = bound_strategy(model)
    return found if found is not None else world.strategy


def strategy_of_optimizer(optimizer: Optimizer, world: World) -> Strategy:
    """Return the strategy that prepared an optimizer, or the wrapped model that has its parameters; else the run's."""
    found = bound_strategy(optimizer)
    if found is None:
        found = strategy_of_owner(optimizer, world)
        bind(optimizer, found)  # so that the next step need not look
    return found


def strategy_of_owner(optimizer: Optimizer, world: World) -> Strategy:
    """Return the strategy of the wrapped model that has an optimizer's parameters; the run's where there is none."""
    owners = world.part(WrappedModels).of_optimizer(optimizer)
    return strategy_of_model(owners[0] if owners else None, world)


def strategy_of_backward(world: World) -> Strategy:
    """Return the strategy whose `backward` a loss goes through: that of the model that was wrapped last."""
    return strategy_of_model(world.part(WrappedModels).last, world)


def parameters_of(optimizer: Optimizer) -> dict[int, nn.Parameter]:
    """Return the parameters that an optimizer steps, by their ids."""
    return {id(tensor): tensor for group in optimizer.param_groups for tensor in group["params"]}


def under_ddp(model: Any) -> DistributedDataParallel | None:
    """Return the DDP in a model that may be compiled around it; ``None`` where there is none."""
    while model is not None and not issubclass(type(model), DistributedDataParallel):
        model = compiled_module(model)
    return model  # type: ignore[no-any-return]
