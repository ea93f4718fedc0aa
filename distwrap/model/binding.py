"""Binding of a model, or an optimizer, to the strategy that prepared it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from distwrap._internals.torch import compiled_module
from distwrap.group.world import RunPart, World, current_world

if TYPE_CHECKING:
    from distwrap.strategies.base import Strategy

_MARK = "_distwrap_strategy"


class PreparedOptimizers(RunPart):
    """Strategies of the optimizers of one run: an optimizer may be the caller's own, and outlive the run."""

    def __init__(self, world: World) -> None:
        self.strategies: WeakKeyDictionary[Optimizer, Strategy] = WeakKeyDictionary()


def bind(thing: nn.Module | Optimizer, strategy: Strategy) -> None:
    """Mark a wrapped model, or an optimizer in this run, with its strategy; a copy or a pickle carries no mark."""
    if isinstance(thing, Optimizer):
        current_world().part(PreparedOptimizers).strategies[thing] = strategy
    else:
        thing.__dict__[_MARK] = strategy


def bound_strategy(thing: Any) -> Strategy | None:
    """Return the strategy of a wrapped model or an optimizer; ``None`` where there is none.

    It is also found where a wrapped model was compiled around its wrapper.
    """
    if isinstance(thing, Optimizer):
        return current_world().part(PreparedOptimizers).strategies.get(thing)
    while True:
        own = getattr(thing, "__dict__", {})
        if _MARK in own:
            found: Strategy = own[_MARK]
            return found
        inner = compiled_module(thing)
        if inner is None:
            return None
        thing = inner


def parameters_of(optimizer: Optimizer) -> dict[int, nn.Parameter]:
    """Return the parameters that an optimizer steps, by their ids."""
    return {id(tensor): tensor for group in optimizer.param_groups for tensor in group["params"]}


def under_ddp(model: Any) -> DistributedDataParallel | None:
    """Return the DDP in a model that may be compiled around it; ``None`` where there is none."""
    while not issubclass(type(model), DistributedDataParallel):
        model = compiled_module(model)
        if model is None:
            return None
    return model  # type: ignore[no-any-return]
