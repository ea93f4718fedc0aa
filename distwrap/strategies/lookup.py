"""Look-up of the strategy to ask: the one that prepared a model or an optimizer, else the run's, else DDP."""

from torch import nn
from torch.optim import Optimizer

from distwrap.group.world import World
from distwrap.model.wrapped_models import WrappedModels, bind, bound_strategy
from distwrap.strategies.base import Strategy


def strategy_of_model(model: nn.Module, world: World) -> Strategy:
    """Return the strategy that prepared a model; the run's for one that none has prepared."""
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
    return strategy_of_model(owners[0], world) if owners else world.strategy


def strategy_of_backward(world: World) -> Strategy:
    """Return the strategy whose `backward` a loss goes through: that of the model that was wrapped last."""
    last = world.part(WrappedModels).last
    return world.strategy if last is None else strategy_of_model(last, world)
