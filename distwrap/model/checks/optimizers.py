"""Look at each optimizer of a run before its first step: it must hold what the wrapped models train."""

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim.optimizer import Optimizer

from distwrap.errors import ModelError
from distwrap.group.optimizer_steps import OptimizerSteps, Phase, has_closure
from distwrap.group.world import RunPart, World
from distwrap.model.checks.drift import Drift
from distwrap.model.checks.unwrapped import Unwrapped
from distwrap.model.transparent import unwrap_model
from distwrap.model.wrapped_models import WrappedModels, bound_strategy, gradients_of, parameters_of


class Optimizers(RunPart):
    """The optimizers that have stepped in a run, each looked at once for each number of its groups of parameters.

    Attributes:
        steps: how many steps they have begun.
    """

    def __init__(self, world: World) -> None:
        self._world, self._models, self._drift = world, world.part(WrappedModels), world.part(Drift)
        self._unwrapped = world.part(Unwrapped)
        self._groups: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self.steps = 0
        world.part(OptimizerSteps).listen(Phase.COMPARE, self._before)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        if self._groups.get(optimizer) != len(optimizer.param_groups):
            self._check(optimizer, has_closure(args, kwargs))
        self._drift.step(optimizer)
        if optimizer in self._unwrapped.watches:
            self._unwrapped.watches[optimizer].average()

    def _check(self, optimizer: Optimizer, has_closure: bool) -> None:
        held, models = parameters_of(optimizer), self._models.of_optimizer(optimizer)
        if self._unwrapped.is_own(optimizer) or self._may_hold_shards(optimizer, models):
            return
        has_gradients = any(tensor.grad is not None for tensor in held.values())
        if (
            self._world.tells_others
            and (has_gradients or has_closure)
            and not models
            and bound_strategy(optimizer) is None
        ):
            self._unwrapped.refuse(optimizer)
        if not has_gradients:
            for model in self._models:
                self._refuse_copies(optimizer, held, model)
            return
        self._groups[optimizer] = len(optimizer.param_groups)
        self._unwrapped.train_otherwise()
        for model in models:
            self._refuse_newcomers(held, model)
        strategies = map(bound_strategy, models)
        if held.keys() - self._unwrapped.known() and all(each is None or each.same_weights for each in strategies):
            watches = [watch for watch in self._drift.watches if watch.trained_by(optimizer)]
            ranks = watches[0].ranks if watches else list(range(self._world.placement.world_size))
            self._unwrapped.watch(optimizer, ranks)

    def _may_hold_shards(self, optimizer: Optimizer, models: list[nn.Module]) -> bool:
        """Return whether the optimizer's tensors may be shards that a strategy has made of a model's parameters."""
        own = bound_strategy(optimizer)
        strategies = [own] if own is not None else map(bound_strategy, self._models)
        return not models and any(each is not None and each.shards and not each.steps_parameters for each in strategies)

    def _refuse_newcomers(self, held: dict[int, nn.Parameter], model: nn.Module) -> None:
        """Refuse to train a parameter that was added to a wrapped model, since its gradient is not averaged."""
        gradients, net = gradients_of(model), unwrap_model(model)
        for name, parameter in net.named_parameters() if gradients is not None else ():
            if id(parameter) in held and parameter.grad is not None and not gradients.knows(parameter):
                raise ModelError(
                    f"rank {self._world.placement.rank}: the parameter {name!r} was added to {type(net).__name__} "
                    "after wrap_model(), so that DDP does not average its gradient, and it would differ between the "
                    "ranks (DW104). Change the model before wrap_model(), or wrap again: model = "
                    "wrap_model(unwrap_model(model))."
                )

    def _refuse_copies(self, optimizer: Optimizer, held: dict[int, nn.Parameter], model: nn.Module) -> None:
        """Refuse an optimizer that would train nothing, as one that was made of a copy of the model."""
        parameters = list(model.parameters())
        trained = any(parameter.grad is not None for parameter in parameters)
        alike = {tensor.shape for tensor in held.values()} <= {parameter.shape for parameter in parameters}
        if trained and alike and held.keys().isdisjoint(map(id, parameters)):
            raise ModelError(
                f"rank {self._world.placement.rank}: this {type(optimizer).__name__} holds none of the parameters of "
                f"{type(unwrap_model(model)).__name__}, but others of the same shapes, which have no gradient: "
                "it would train nothing. Make the optimizer from model.parameters() of the model that "
                "wrap_model() got or returned: not of a copy, and not before a .to() that replaces the "
                "parameters, as it does on some devices."
            )
