"""Look at each optimizer of a run before its first step: it must hold what the wrapped models train."""

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim.optimizer import Optimizer

from distwrap.errors import ModelError
from distwrap.group.optimizer_steps import OptimizerSteps, Phase, has_closure
from distwrap.group.world import RunPart, World
from distwrap.model.distributed import ReplicaModel
from distwrap.model.drift import Drift
from distwrap.model.transparent import unwrap_model
from distwrap.model.unwrapped import Unwrapped
from distwrap.model.wrapped_models import WrappedModels, bound_strategy, gradients_of, parameters_of


class Optimizers(RunPart):
    """The optimizers that have stepped in a run, each looked at once for each number of its groups of parameters.

    Attributes:
        steps: how many steps they have begun.
    """

    def __init__(self, world: World) -> None:
        self._rank, self._models, self._drift = world.placement.rank, world.part(WrappedModels), world.part(Drift)
        self._unwrapped = world.part(Unwrapped) if world.tells_others else None
        self._groups: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self.steps = 0
        world.part(OptimizerSteps).listen(Phase.COMPARE, self._before)

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer with gradients has stepped, of those that still exist."""
        return bool(self._groups)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        if self._groups.get(optimizer) != len(optimizer.param_groups):
            self._check(optimizer, has_closure(args, kwargs))
        self._drift.step(optimizer)
        if self._unwrapped is not None and self._unwrapped.open:
            self._unwrapped.look_again(optimizer)

    def _check(self, optimizer: Optimizer, has_closure: bool) -> None:
        is_own = optimizer in self._drift.apart or (self._unwrapped is not None and self._unwrapped.is_local(optimizer))
        if is_own or self._may_hold_shards(optimizer):
            return
        held, models = parameters_of(optimizer), self._models.of_optimizer(optimizer)
        has_gradients = any(tensor.grad is not None for tensor in held.values())
        trains = has_gradients or has_closure
        if self._unwrapped is not None and trains and not models and bound_strategy(optimizer) is None:
            self._unwrapped.look(optimizer)
        if has_gradients:
            self._groups[optimizer] = len(optimizer.param_groups)
            for model in models:
                self._refuse_newcomers(held, model)
            # Of a model whose ranks differ on purpose nobody compares what is trained beside it.
            if held.keys() - self._drift.known() and all(isinstance(model, ReplicaModel) for model in models):
                self._drift.watch_unwrapped_tensors(optimizer)
        else:
            for model in self._models:
                self._refuse_copies(optimizer, held, model)

    def _may_hold_shards(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer's tensors may be shards that a strategy has made of a model's parameters."""
        own = bound_strategy(optimizer)
        strategies = [own] if own is not None else map(bound_strategy, self._models)
        divides = any(each is not None and each.shards and not each.steps_parameters for each in strategies)
        return divides and not self._models.of_optimizer(optimizer)

    def _refuse_newcomers(self, held: dict[int, nn.Parameter], model: nn.Module) -> None:
        """Refuse to train a parameter that was added to a wrapped model, since its gradient is not averaged."""
        gradients, net = gradients_of(model), unwrap_model(model)
        if gradients is None:
            return
        for name, parameter in net.named_parameters():
            if id(parameter) in held and parameter.grad is not None and not gradients.knows(parameter):
                raise ModelError(
                    f"rank {self._rank}: the parameter {name!r} was added to {type(net).__name__} after "
                    "wrap_model(), so that DDP does not average its gradient, and it would differ between the "
                    "ranks (DW104). Change the model before wrap_model(), or wrap again: model = "
                    "wrap_model(unwrap_model(model))."
                )

    def _refuse_copies(self, optimizer: Optimizer, held: dict[int, nn.Parameter], model: nn.Module) -> None:
        """Refuse an optimizer that would train nothing, as one that was made of a copy of the model."""
        parameters = list(model.parameters())
        trained = any(parameter.grad is not None for parameter in parameters)
        shapes = {parameter.shape for parameter in parameters}
        alike = all(tensor.shape in shapes for tensor in held.values())
        if trained and alike and held.keys().isdisjoint(map(id, parameters)):
            raise ModelError(
                f"rank {self._rank}: this {type(optimizer).__name__} holds none of the parameters of "
                f"{type(unwrap_model(model)).__name__}, but others of the same shapes, which have no gradient: "
                "it would train nothing. Make the optimizer from model.parameters() of the model that "
                "wrap_model() got or returned: not of a copy, and not before a .to() that replaces the "
                "parameters, as it does on some devices."
            )
