"""State that ranks which come back take over: of models, optimizers, schedulers, loaders and other objects."""

from __future__ import annotations

import zlib
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from distwrap._internals.torch import norm_classes
from distwrap.data.changing import start_of_next
from distwrap.errors import ModelError
from distwrap.group.tensors_apart import bytes_of
from distwrap.live_objects import instances
from distwrap.model.wrapped_models import parameters_of
from distwrap.strategies.torchft.rounds import WeightRounds


class TrainingState:
    """State of the training on this rank.

    Attributes:
        models: the models that all ranks train, in the order in which they were wrapped.
        rounds: the rounds of models whose ranks exchange weights now and then, instead of gradients.
        objects: other objects that the user has named.
    """

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.rounds: dict[nn.Module, WeightRounds] = {}
        self.objects: tuple[Any, ...] = ()
        self._loaders: list[ref[Any]] = []

    def add_loader(self, loader: Any) -> None:
        """Add a loader, whose position belongs to the state."""
        self._loaders.append(ref(loader))

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the trained tensors themselves and not copies."""
        things = self.things()
        loaders = [None if (loader := each()) is None else start_of_next(loader) for each in self._loaders]
        states = {kind: {name: each.state_dict() for name, each in named.items()} for kind, named in things.items()}
        return {**states, "loaders": loaders}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of another rank.

        Raises:
            ModelError: it belongs to other objects.
        """
        for kind, mine in self.things().items():
            theirs = state[kind]
            if mine.keys() != theirs.keys():
                raise ModelError(
                    f"this rank has come back with the {kind} {sorted(mine)}, and the others have "
                    f"{sorted(theirs)}: the code before the loop must make the same objects each time the "
                    "function begins."
                )
            for name, thing in mine.items():
                thing.load_state_dict(theirs[name])
        for each, its_state in zip(self._loaders, state["loaders"], strict=True):
            loader = each()
            if loader is not None and its_state is not None:
                loader.load_state_dict(its_state)

    def buffers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the running statistics of norms, each with a copy."""
        return [(each, each.clone()) for model in self.models for each in running_statistics(model)]

    def fingerprint(self) -> int:
        """Return a number of weights and learning rates that is equal if all of them are equal to the bit."""
        alike = [rounds.anchor for rounds in self.rounds.values()]
        alike += [each for model in self.models if model not in self.rounds for each in model.parameters()]
        groups = [group for optimizer in self.things()["optimizers"].values() for group in optimizer.param_groups]
        found = zlib.crc32(repr([group.get("lr") for group in groups]).encode())
        for tensor in alike:
            found = zlib.crc32(bytes_of(tensor.detach().cpu()), found)
        return found

    def things(self) -> dict[str, dict[str, Any]]:
        """Return the objects with a state, by kind and by a name that is the same on all ranks.

        Raises:
            ModelError: two objects have the same name.
        """
        models = {f"{type(model).__name__} {number}": model for number, model in enumerate(self.models, 1)}
        trained = {
            id(each): f"{of}'s {name}" for of, model in models.items() for name, each in model.named_parameters()
        }
        given = {id(thing) for thing in self.objects}
        optimizers: dict[str, Any] = {}
        schedulers: dict[str, Any] = {}
        for optimizer in instances(Optimizer):
            first = next((trained[key] for key in parameters_of(optimizer) if key in trained), None)
            if first is not None and id(optimizer) not in given:
                _add(optimizers, f"{type(optimizer).__name__} of {first}", optimizer)
        known = {id(optimizer): name for name, optimizer in optimizers.items()}
        for scheduler in instances(LRScheduler):
            of = known.get(id(getattr(scheduler, "optimizer", None)))
            if of is not None and id(scheduler) not in given:
                _add(schedulers, f"{type(scheduler).__name__} of {of}", scheduler)
        return {
            "models": models,
            "rounds": {name: self.rounds[model] for name, model in models.items() if model in self.rounds},
            "optimizers": dict(sorted(optimizers.items())),  # the collector's order is each rank's own
            "schedulers": dict(sorted(schedulers.items())),
            "objects": {f"{type(thing).__name__} {number}": thing for number, thing in enumerate(self.objects, 1)},
        }


def running_statistics(model: nn.Module) -> list[torch.Tensor]:
    """Return the buffers that a forward of norms changes; as under DDP, rank 0's are used after each step."""
    norms = (module for module in model.modules() if isinstance(module, norm_classes()))
    return [each for module in norms for each in module.buffers(recurse=False) if each.is_floating_point()]


def _add(found: dict[str, Any], name: str, thing: Any) -> None:
    if name in found:
        raise ModelError(
            f"max_lost=: there are two objects called {name}, which a rank that comes back could not tell "
            "apart. Hand both to resumable(range(epochs), first, second)."
        )
    found[name] = thing
