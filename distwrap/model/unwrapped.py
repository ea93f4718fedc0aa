"""An optimizer of a model that nobody has wrapped: each rank would train a model of its own, in silence.

It is refused at its first step, before the weights change, unless the model is `local_model`'s, or in a wrapper of
torch's own. Each rank tells its gradients, and waits a moment for the others': a rank that trains something alone is
right, and so are all where they have averaged by hand, since their gradients are then the same.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from weakref import WeakSet, ref

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from distwrap._internals.torch import collectives_begun
from distwrap.errors import ModelError
from distwrap.group.collective_guard import CollectiveGuard
from distwrap.group.world import RunPart, World, say_once
from distwrap.live_objects import instances
from distwrap.model.fingerprints import fingerprint
from distwrap.model.transparent import TransparentModule
from distwrap.model.wrapped_models import parameters_of
from distwrap.network.waiting import wait_until
from distwrap.seeding import mix
from distwrap.supervision.users_source import where_made

_FIRST_SECONDS = 5.0  # for the other ranks to come to the same step, before this one takes it
_LATER_SECONDS = 0.5  # once this rank was seen to train something alone
_LOOKS = 1000  # steps, after which nobody else will come


class Unwrapped(RunPart):
    """Models of a run that no strategy wraps.

    Attributes:
        local: those that are each rank's own on purpose.
        open: steps that no other rank has taken yet; looked at again before later ones.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._begun, self._patience = collectives_begun(), _FIRST_SECONDS
        self.open: list[_Step] = []
        self.local: WeakSet[nn.Module] = WeakSet()
        self._computing: WeakSet[Optimizer] = WeakSet()  # those that compute their gradients in their step

    def is_local(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer has parameters of models that are each rank's own on purpose."""
        held = parameters_of(optimizer)
        return any(id(parameter) in held for model in self.local for parameter in model.parameters())

    def _may_be_by_hand(self) -> bool:
        """Return whether there were collectives since the run began, in which gradients may have been averaged."""
        now = collectives_begun()
        return now is None or now != self._begun

    def look(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that steps parameters of a module that is not wrapped, if other ranks do so too.

        Raises:
            ModelError: names the module's class, and the line that has made the optimizer.
        """
        held = parameters_of(optimizer)
        modules = [each for each in instances(nn.Module) if not is_released(each)]
        model = model_of(held, modules)
        if model is None or self._world.part(CollectiveGuard).function or _is_torchs(held, modules):
            return
        grads = [tensor.grad for tensor in held.values() if tensor.grad is not None]
        by_hand = self._may_be_by_hand()
        if not grads and by_hand:
            self._look_after(optimizer)
            return
        name = f"unwrapped {type(optimizer).__name__} {self._world.count('an unwrapped optimizer')}"
        mine = json.dumps(mix(*(fingerprint(grad) for grad in grads)))
        assert self._world.channel is not None
        self._world.channel.note(name, mine, optimizer)
        step = _Step(name, mine, type(model).__name__, by_hand, ref(optimizer))
        if not wait_until(lambda: self.is_settled(step, optimizer), self._patience):
            self.open.append(step)
            self._patience = _LATER_SECONDS  # this rank trains alone, and may do so again

    def _look_after(self, optimizer: Optimizer) -> None:
        """Look after the first step of an optimizer that computes its gradients in it, as L-BFGS does."""
        if optimizer in self._computing:
            return
        self._computing.add(optimizer)

        def after(stepped: Optimizer, *_: object) -> None:
            handle.remove()
            if any(tensor.grad is not None for tensor in parameters_of(stepped).values()):
                self.look(stepped)

        handle = optimizer.register_step_post_hook(after)

    def look_again(self, optimizer: Optimizer) -> None:
        """Check again whether other ranks train by now what only this rank had trained so far."""
        for step in list(self.open):
            step.looks += 1
            owner = step.optimizer()
            if owner is None or (owner is optimizer and (step.looks > _LOOKS or self.is_settled(step, optimizer))):
                self.open.remove(step)

    def is_settled(self, step: _Step, optimizer: Optimizer) -> bool:
        """Return whether all ranks have taken a step, with the same gradients.

        Raises:
            ModelError: they were not, or cannot have been averaged.
        """
        place, kind, channel = self._world.placement, step.kind, self._world.channel
        assert channel is not None
        others = [rank for rank in range(place.world_size) if rank != place.rank]
        told = {rank: channel.noted(step.name, rank) for rank in others}
        unlike = next((rank for rank, theirs in told.items() if theirs not in ("", step.gradients)), None)
        if unlike is None and (step.by_hand or not any(told.values())):
            if all(told.values()):
                say_once(
                    f"unwrapped {kind}",
                    f"{kind} is not wrapped, and has the same gradients on all ranks: unless you average them "
                    f"by hand, all {place.world_size} ranks do the same work. Write model = wrap_model(model) "
                    "and loader = shard_loader(loader), and use what they return.",
                )
            return all(told.values())
        made, when = where_made(optimizer), "has stepped" if optimizer in self._computing else "is about to step"
        raise ModelError(
            f"rank {place.rank}: this {type(optimizer).__name__}{made and f', made at {made},'} {when} {kind}, "
            "which wrap_model() has not "
            f"wrapped{'' if unlike is None else f', and rank {unlike} has other gradients'}: each of the "
            f"{place.world_size} ranks would train a {kind} of its own (DW104). Write model = wrap_model(model) before "
            "the loop, in the function that the ranks run, and train what it returns. If each rank is meant to "
            "have its own, as a probe or a player, say model = local_model(model)."
        )


@dataclass(eq=False)
class _Step:
    """First step of an optimizer of a model that is not wrapped, until other ranks are seen to take it too.

    Attributes:
        name: by which the ranks tell each other of it.
        gradients: their fingerprint.
        kind: the model's class.
        by_hand: whether there were collectives before, in which gradients may have been averaged.
        optimizer: held weakly.
        looks: how often this rank has looked since.
    """

    name: str
    gradients: str
    kind: str
    by_hand: bool
    optimizer: ref[Optimizer]
    looks: int = 0


def is_released(module: nn.Module) -> bool:
    """Return whether a module is a wrapper of ours whose run has ended, as that of a simulated rank beside this one."""
    return isinstance(module, TransparentModule) and "_distwrap_model" not in vars(module)


def model_of(held: dict[int, nn.Parameter], modules: list[nn.Module]) -> nn.Module | None:
    """Return the smallest module that has all of an optimizer's parameters, or the most; ``None`` if none has any."""
    counted = []
    for module in modules:
        own = [id(parameter) for parameter in module.parameters()]
        if common := len(held.keys() & set(own)):
            counted.append((common, -len(own), len(list(module.modules())), module))
    return max(counted, key=lambda each: each[:3])[3] if counted else None


def _is_torchs(held: dict[int, nn.Parameter], modules: list[nn.Module]) -> bool:
    """Return whether a wrapper of torch's, which the user has made, exchanges the gradients of these parameters."""
    wrappers = [
        module
        for module in modules
        if isinstance(module, DistributedDataParallel) or type(module).__name__ == "FullyShardedDataParallel"
    ]
    averaged = {id(parameter) for module in wrappers for parameter in module.parameters()}
    return bool(held.keys() & averaged) or any(hasattr(tensor, "placements") for tensor in held.values())
