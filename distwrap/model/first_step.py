"""Proof after the first optimizer step that all ranks hold the same weights, and the optimizer holds the model's.

The ranks leave fingerprints on the side channel, and compare them a step or more later. Nobody waits, and after that
nothing of this is left in the loop.
"""

import json
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from distwrap.devices.kinds import kind_of
from distwrap.errors import ModelError
from distwrap.group.world import RunPart, World
from distwrap.model import in_sync
from distwrap.model.distributed import ReplicaModel
from distwrap.model.in_sync import Held, Mark
from distwrap.model.transparent import unwrap_model
from distwrap.model.wrapped_models import WrappedModels, bound_strategy, parameters_of
from distwrap.supervision.channel import Channel

_PATIENCE = 50  # steps, after which what is still open stays so


class FirstSteps(RunPart):
    """Watch over the first step of each optimizer of a run, on one rank."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rank, self._world_size = world.placement.rank, world.placement.world_size
        self._proven: WeakSet[nn.Module] = WeakSet()
        self._seen: WeakSet[Optimizer] = WeakSet()
        self._open: dict[str, list[Mark]] = {}
        self._steps = 0
        self._handles: list[Any] = []

    def start(self, channel: Channel) -> None:
        """Look at the next step of each optimizer that holds parameters of a wrapped model, after all other hooks."""
        self._channel, self._steps = channel, 0
        self._open.clear()
        self.close()
        self._handles = [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]

    def close(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._compare()
        if optimizer not in self._seen and not self._may_hold_shards(optimizer):
            self._refuse_strangers(optimizer)
        self._steps += 1
        done = not self._open and all(model in self._proven for model in self._world.part(WrappedModels))
        if (done or self._steps > _PATIENCE) and self._are_last():
            self.close()

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        held = parameters_of(optimizer)
        if optimizer in self._seen or all(tensor.grad is None for tensor in held.values()):
            return
        self._seen.add(optimizer)
        models = self._world.part(WrappedModels).of_optimizer(optimizer)
        shards = not models and self._may_hold_shards(optimizer)
        if shards:
            models = list(self._world.part(WrappedModels))
        tensors: list[Held] = []
        for model in models:
            self._proven.add(model)
            strategy = bound_strategy(model)
            if strategy is not None and not isinstance(model, ReplicaModel):
                kind = type(unwrap_model(model)).__name__
                tensors += [held._replace(name=f"{kind}.{held.name}") for held in strategy.held(model)]
        known = {id(parameter) for model in models for parameter in model.parameters()}
        for number, tensor in enumerate(() if shards else held.values()):
            if id(tensor) not in known and tensor.grad is not None:
                name = f"tensor {number} of {type(optimizer).__name__}, which no wrapped model has"
                tensors.append(Held(name, "", tensor))
        if tensors:
            key = f"first_step/{self._world.count('first step')}"
            self._open[key] = in_sync.fingerprints(tensors)
            mine = [kind_of(self._world.device).processor(self._world.device), self._open[key]]
            self._channel.note(f"{key}/{self._rank}", json.dumps(mine))

    def _compare(self) -> None:
        for key in list(self._open):
            texts = [self._channel.noted(f"{key}/{rank}") for rank in range(self._world_size)]
            if all(texts):
                del self._open[key]
                everyone = [json.loads(text) for text in texts]
                alike = len({kind for kind, _ in everyone}) == 1
                difference = in_sync.first_difference([marks for _, marks in everyone], exact=alike)
                if difference is not None:
                    raise ModelError(
                        f"rank {self._rank}: after the first step of an optimizer the ranks do not hold the same "
                        f"weights: {difference}. Every rank must start alike (wrap_model() sees to it), average the "
                        f"gradients of all that it trains (parameters outside of a wrapped model are not), and take "
                        f"the same steps with the same learning rate."
                    )

    def _may_hold_shards(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer's tensors may be shards that a strategy has made of a model's parameters."""
        own = bound_strategy(optimizer)
        strategies = [own] if own is not None else map(bound_strategy, self._world.part(WrappedModels))
        return any(strategy is not None and strategy.shards for strategy in strategies)

    def _refuse_strangers(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that would train nothing, as one that was made of a copy of the model."""
        held = parameters_of(optimizer)
        if any(tensor.grad is not None for tensor in held.values()):
            return
        for model in self._world.part(WrappedModels):
            parameters = list(model.parameters())
            trained = any(parameter.grad is not None for parameter in parameters)
            shapes = {parameter.shape for parameter in parameters}
            alike = all(tensor.shape in shapes for tensor in held.values())
            if trained and alike and held.keys().isdisjoint(map(id, parameters)):
                raise ModelError(
                    f"rank {self._rank}: this {type(optimizer).__name__} holds none of the parameters of "
                    f"{type(unwrap_model(model)).__name__}, but others of the same shapes, which have no gradient: it "
                    f"would train nothing. Make it from model.parameters() of what wrap_model() got or returned, not "
                    f"of a copy."
                )

    def _are_last(self) -> bool:
        """Return whether torch has no hook to run after this one, so that hooks may be removed now."""
        hooks = self._handles[0].hooks_dict_ref()
        return hooks is None or next(reversed(hooks)) == self._handles[0].id
