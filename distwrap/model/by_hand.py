"""Find a model that is not wrapped in a loop that updates it by hand, without an optimizer.

As a sharded loader gives its first batches, and neither an optimizer has stepped nor gradients were averaged, each rank
looks at the parameters that are in no wrapped model and in no optimizer, and tells what they have become. Where they
change, and differ between the ranks, each trains its own.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from distwrap.errors import ModelError
from distwrap.group.collective_guard import CollectiveGuard
from distwrap.group.world import RunPart, World
from distwrap.live_objects import instances
from distwrap.model.drift import Drift
from distwrap.model.fingerprints import fingerprint
from distwrap.model.optimizers import Optimizers
from distwrap.model.unwrapped import is_released
from distwrap.model.wrapped_models import parameters_of
from distwrap.seeding import mix
from distwrap.simulated import simulation

_LOOKS = (2, 3, 4, 8)  # batches of a run, before each of which the parameters are looked at


class ByHand(RunPart):
    """Watch over the models of a run in which no wrapper averages and no optimizer steps."""

    def __init__(self, world: World) -> None:
        assert world.channel is not None
        self._world, self._channel, self._batches = world, world.channel, 0
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._counts: Counter[str] = Counter()
        self._seen: dict[str, dict[str, int]] = {}  # of each model what it was, by the number of batches before

    def observers(self) -> list[Callable[[int, Any], None]]:
        """Return what is to be called before the loop has a batch, as long as there is something to look at."""
        return [self._look_before] if self._batches < _LOOKS[-1] else []

    def _look_before(self, number: int, batch: Any) -> None:
        if self._batches < _LOOKS[-1] and torch.is_grad_enabled():  # else it is no training
            self._batches += 1
            if self._batches in _LOOKS:
                self._look()

    def _look(self) -> None:
        """Look at the models, tell the other ranks, and compare with what these have told.

        Raises:
            ModelError: a model has changed, and differs between ranks.
        """
        if self._world.part(Drift).averages or self._world.part(Optimizers).has_stepped:
            self._batches = _LOOKS[-1]  # it trains as most do, and is watched by that
            return
        if self._world.part(CollectiveGuard).function:
            return
        for model, parameters in self._models().items():
            if model not in self._names:
                kind = f"{type(model).__name__} {mix(*(str(parameter.shape) for parameter in parameters)):x}"
                self._counts[kind] += 1
                self._names[model] = f"{kind} {self._counts[kind]}"
            seen = self._seen.setdefault(self._names[model], {})
            seen[str(self._batches)] = mix(*map(fingerprint, parameters))
        self._channel.note("by hand", json.dumps(self._seen), self)
        self.wait()

    def wait(self) -> None:
        """Compare with what the other ranks have told so far.

        Raises:
            ModelError: a model has changed, and differs between ranks.
        """
        place = self._world.placement
        others = [rank for rank in range(place.world_size) if rank != place.rank]
        for rank in others if self._seen else ():
            for name, theirs in json.loads(self._channel.noted("by hand", rank) or "{}").items():
                mine = self._seen.get(name, {})
                both = [batches for batches in mine if batches in theirs]
                if len({mine[batches] for batches in both}) < 2 or len({theirs[batches] for batches in both}) < 2:
                    continue  # nobody trains it, or one rank alone
                if mine[both[-1]] != theirs[both[-1]]:
                    raise ModelError(_in_words(name.split()[0], place.rank, rank, place.world_size))

    def _models(self) -> dict[nn.Module, list[nn.Parameter]]:
        """Return the outermost modules with parameters that a step by hand may train, and these."""
        found = instances(nn.Module, Optimizer)
        simulated = simulation()
        modules = [
            module
            for module in found
            if isinstance(module, nn.Module)
            and not is_released(module)
            and (simulated is None or simulated.has_made(module))
        ]
        known = self._world.part(Drift).known()
        for optimizer in found:
            if isinstance(optimizer, Optimizer):
                known |= parameters_of(optimizer).keys()
        inner = {id(part) for module in modules for part in module.children()}
        left = {
            module: [each for each in module.parameters() if _may_be_stepped(each) and id(each) not in known]
            for module in modules
            if id(module) not in inner
        }
        return {module: parameters for module, parameters in left.items() if parameters}


def _may_be_stepped(parameter: nn.Parameter) -> bool:
    """Return whether a loop may step a parameter by hand; a look at a part of a divided one is a collective."""
    return type(parameter) is nn.Parameter and parameter.requires_grad and not parameter.is_meta


def _in_words(kind: str, rank: int, other: int, world_size: int) -> str:
    return (
        f"rank {rank}: the weights of {kind}, which wrap_model() has not wrapped, have changed, and differ "
        f"from those of rank {other}: no optimizer holds them, so the loop updates them by hand, and each "
        f"of the {world_size} ranks trains a {kind} of its own (DW104). Write model = wrap_model(model) before the "
        "loop, and train what it returns. If each rank is to have its own, say model = local_model(model)."
    )
