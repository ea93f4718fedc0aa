"""An optimizer of a model that nobody has wrapped: each rank would train a model of its own, in silence.

It is refused at its first step, before the weights change, unless the model is `local_model`'s, or of torch's own
wrappers. Who averages gradients by hand has the same ones on all ranks: where there were collectives, each rank tells
its own, and waits a moment for the others'.
"""

from __future__ import annotations

import json
import time
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from distwrap._internals.torch_groups import collectives_so_far
from distwrap.errors import ModelError
from distwrap.group.collective_guard import CollectiveGuard
from distwrap.group.world import RunPart, World, say_once
from distwrap.live_objects import instances
from distwrap.model.fingerprints import fingerprint
from distwrap.model.wrapped_models import parameters_of
from distwrap.seeding import mix
from distwrap.supervision.users_source import where_made

_ARRIVAL_SECONDS = 10.0  # for the other ranks, which a collective has just brought together, to step too


class Unwrapped(RunPart):
    """Models of a run that no strategy wraps.

    Attributes:
        local: those that are each rank's own on purpose.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._begun = collectives_so_far()
        self.local: WeakSet[nn.Module] = WeakSet()

    def is_local(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer has parameters of models that are each rank's own on purpose."""
        held = parameters_of(optimizer)
        return any(id(parameter) in held for model in self.local for parameter in model.parameters())

    def may_be_by_hand(self) -> bool:
        """Return whether there were collectives since the run began, in which gradients may have been averaged."""
        now = collectives_so_far()
        return now is None or now != self._begun

    def refuse(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that steps parameters of a module that nobody has wrapped.

        Raises:
            ModelError: names the module's class, and the line that has made the optimizer.
        """
        held = parameters_of(optimizer)
        model = _model_of(held)
        if model is None or self._world.part(CollectiveGuard).function or _is_torchs(held):
            return
        grads = [tensor.grad for tensor in held.values() if tensor.grad is not None]
        kind, differ = type(model).__name__, ""
        if self.may_be_by_hand():
            if not grads:
                return  # of an optimizer that computes them in its step: the next one knows
            differ = self._difference(optimizer, grads)
            if not differ:
                say_once(
                    f"unwrapped {kind}",
                    f"{kind} is not wrapped, and has the same gradients on all ranks: it is trained as by one process "
                    f"if you average them by hand, or give all ranks the same data.",
                )
                return
        made = where_made(optimizer)
        raise ModelError(
            f"rank {self._world.placement.rank}: this {type(optimizer).__name__}{made and f', made at {made},'} is "
            f"about to step {kind}, which wrap_model() has not wrapped{differ}: each of the "
            f"{self._world.placement.world_size} ranks would train a {kind} of its own. Write model = "
            f"wrap_model(model) before the loop, and train what it returns. If each rank is to have its own, as a "
            f"probe or a player, say model = local_model(model)."
        )

    def _difference(self, optimizer: Optimizer, grads: list[torch.Tensor]) -> str:
        """Return in words why gradients are not those of all ranks; empty where they are."""
        channel, place = self._world.channel, self._world.placement
        assert channel is not None
        name = f"unwrapped {type(optimizer).__name__} {self._world.count('an unwrapped optimizer')}"
        mine = json.dumps(mix(*(fingerprint(grad) for grad in grads)))
        channel.note(name, mine)
        missing, deadline = set(range(place.world_size)) - {place.rank}, time.monotonic() + _ARRIVAL_SECONDS
        while missing and time.monotonic() < deadline:
            for rank in list(missing):
                theirs = channel.noted(name, rank)
                if theirs and theirs != mine:
                    return f", and rank {rank} has other gradients"
                missing -= {rank} if theirs else set()
            time.sleep(0.005 if missing else 0)
        return f", and rank {min(missing)} takes no such step" if missing else ""


def _model_of(held: dict[int, nn.Parameter]) -> nn.Module | None:
    """Return the smallest module that has all of an optimizer's parameters, or the most; ``None`` if none has any."""
    counted = []
    for module in instances(nn.Module):
        own = [id(parameter) for parameter in module.parameters()]
        if common := len(held.keys() & set(own)):
            counted.append((common, -len(own), len(list(module.modules())), module))
    return max(counted, key=lambda each: each[:3])[3] if counted else None


def _is_torchs(held: dict[int, nn.Parameter]) -> bool:
    """Return whether a wrapper of torch's, which the user has made, exchanges the gradients of these parameters."""
    wrappers: list[nn.Module] = [
        module
        for module in instances(nn.Module)
        if isinstance(module, DistributedDataParallel) or type(module).__name__ == "FullyShardedDataParallel"
    ]
    averaged = {id(parameter) for module in wrappers for parameter in module.parameters()}
    return bool(held.keys() & averaged) or any(hasattr(tensor, "placements") for tensor in held.values())
