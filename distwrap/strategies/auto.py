"""``strategy="auto"``: the simplest strategy whose estimated memory fits on the smallest device of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from distwrap.checks import as_bytes
from distwrap.devices.kinds import kind_of
from distwrap.errors import OptionError
from distwrap.group.collectives import gather_object
from distwrap.group.setup import require_group
from distwrap.group.world import RunPart, World, current_world, say_once
from distwrap.model.transparent import unwrap_model
from distwrap.model.wrapped_models import WrappedModels, bind, bound_strategy, parameters_of
from distwrap.options import Options
from distwrap.precision import InPrecision
from distwrap.protocols import Strategy
from distwrap.registry import strategies
from distwrap.strategies import base
from distwrap.strategies.estimate import Need, estimate, optimizer as optimizer_named, recommended


def _of_chosen(name: str) -> Callable[..., Any]:
    """Return a method that calls the same method of the strategy chosen for a model or optimizer."""

    def method(self: AutoStrategy, thing: nn.Module | Optimizer, *args: Any, **kwargs: Any) -> Any:
        return getattr(_chosen(thing), name)(thing, *args, **kwargs)

    method.__doc__ = f"Call ``{name}()`` of the strategy that was chosen."
    return method


class AutoStrategy(base.Strategy):
    """The simplest of ddp, zero1, hsdp and fsdp that fits, chosen when each model is wrapped.

    The optimizer and the activations are not known then: a quarter of the device is left for activations.

    Args:
        device_memory: the memory of each rank's device, as ``"80GB"``; by default the device's own, or on the CPU this
            rank's share of the host's memory. The smallest of all ranks counts.
        optimizer: the optimizer to assume, as ``"adamw"`` or ``"sgd(momentum=0.9)"``.
        backend: the backend of the process group.

    Raises:
        OptionError: an argument is not valid.

    Example:
        >>> AutoStrategy(device_memory="80GB")
        AutoStrategy(device_memory='80GB')
    """

    def __init__(
        self, *, device_memory: int | str | None = None, optimizer: str = "adamw", backend: str | None = None
    ) -> None:
        self.device_memory, self.optimizer, self.backend = device_memory, optimizer, backend
        if device_memory is not None:
            as_bytes("device_memory", device_memory)
        optimizer_named(optimizer)

    def choose(self, model: nn.Module, run: Options, device: torch.device) -> Strategy:
        world = current_world()
        place, taken = world.placement, world.part(_Taken)
        if place.world_size > 1:
            require_group("wrap_model")
        needs = estimate(
            model,
            place.world_size,
            place.local_world_size,
            InPrecision(run.precision, device),
            optimizer_named(self.optimizer),
        )
        memory = max(0, self._memory(device, place.local_world_size) - taken.beside(model))
        everyones = gather_object((memory, [vars(need) for need in needs]))  # so that all ranks choose alike
        memory, needs = min(each for each, _ in everyones), [Need(**each) for each in everyones[0][1]]
        able = {need.strategy: strategies.make(need.strategy) for need in needs}
        needs = [need for need in needs if _takes(able[need.strategy], run)]
        choice = recommended(needs, memory)
        chosen = able[choice.strategy]
        taken.by[unwrap_model(model)] = next(need.total for need in needs if need.strategy == choice.strategy)
        said = f"strategy='auto' is {choice.strategy!r} for {type(unwrap_model(model)).__name__}: {choice.why}"
        say_once(said, f"{said} (assuming {self.optimizer}, without activations)")
        _bind_optimizers(model, chosen)
        return chosen

    prepare_optimizer = _of_chosen("prepare_optimizer")
    sync_gradients = _of_chosen("sync_gradients")
    gradients = _of_chosen("gradients")
    clip = _of_chosen("clip")
    step = _of_chosen("step")
    held = _of_chosen("held")
    is_divided = _of_chosen("is_divided")
    state = _of_chosen("state")
    load_state = _of_chosen("load_state")
    parts = _of_chosen("parts")
    parts_to_load = _of_chosen("parts_to_load")

    def _memory(self, device: torch.device, ranks_here: int) -> int:
        if self.device_memory is not None:
            return as_bytes("device_memory", self.device_memory)
        return memory_of(device, ranks_here)


def memory_of(device: torch.device, ranks_here: int) -> int:
    """Return the bytes for one rank: those of its device, or its share of the host's memory.

    Raises:
        OptionError: torch does not know the size.
    """
    memory = kind_of(device).memory(device)
    if memory is None:
        raise OptionError(f"torch does not say how much memory {device} has. Give it, as device_memory='80GB'.")
    return memory // ranks_here if device.type == "cpu" else memory


class _Taken(RunPart):
    """Bytes that the models of one run need, by the strategies chosen for them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.by: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    def beside(self, model: nn.Module) -> int:
        """Return the bytes of the other models that are trained and still exist."""
        others = {unwrap_model(wrapped) for wrapped in self._world.part(WrappedModels)} - {unwrap_model(model)}
        return sum(self.by.get(other, 0) for other in others)


def _takes(strategy: Strategy, run: Options) -> bool:
    """Return whether a strategy accepts the run's options, such as ``comm=``."""
    try:
        strategy.check(replace(run, strategy=strategy))
    except OptionError:
        return False
    return True


def _bind_optimizers(model: nn.Module, chosen: Strategy) -> None:
    """Bind optimizers that were prepared before their model to the strategy chosen for the model."""
    own, bound = set(map(id, model.parameters())), current_world().part(WrappedModels).bound
    for thing, strategy in list(bound.items()):
        if isinstance(strategy, AutoStrategy) and isinstance(thing, Optimizer) and own & parameters_of(thing).keys():
            bind(thing, chosen)


def _chosen(thing: nn.Module | Optimizer) -> Strategy:
    """Return the strategy of a model, or of an optimizer's first model; a neutral one if there is none."""
    models = [thing] if isinstance(thing, nn.Module) else current_world().part(WrappedModels).of_optimizer(thing)
    found = [strategy for each in models if (strategy := bound_strategy(each)) is not None]
    return next((strategy for strategy in found if not isinstance(strategy, AutoStrategy)), base.Strategy())
