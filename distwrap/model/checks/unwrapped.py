"""What the ranks train that no strategy wraps: each would train a model of its own, in silence.

- An optimizer of such a model is refused at its first step, before the weights change. Each rank publishes its
  gradients, and waits a moment for the others': a rank that trains something alone is right, and so are all where they
  have averaged by hand, since their gradients are then the same.
- What an optimizer holds that is in no wrapped model is compared as the weights of wrapped models are.
- Without an optimizer, the parameters of such models are compared as a sharded loader gives its first batches: where
  they change, and differ between the ranks, the loop updates them by hand.

What `local_model` or ``wrap_optimizer(apart=True)`` names is each rank's own, and left alone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import chain, product
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from distwrap._internals.torch import collectives_begun
from distwrap.errors import ModelError
from distwrap.group.collective_guard import CollectiveGuard
from distwrap.group.world import RunPart, World, say_once
from distwrap.live_objects import instances
from distwrap.model.checks.drift import Watch, learning_rates
from distwrap.model.checks.in_sync import ComparedTensor, Ledger, fingerprint
from distwrap.model.transparent import TransparentModule
from distwrap.model.wrapped_models import WrappedModels, parameters_of
from distwrap.network.waiting import wait_until
from distwrap.seeding import mix
from distwrap.simulated import simulation
from distwrap.supervision.activity import Activity
from distwrap.supervision.users_source import where_made

_FIRST_SECONDS = 5.0  # for the other ranks to come to the same step, before this one takes it
_LATER_SECONDS = 0.5  # once this rank was seen to train something alone
_KEPT = 8  # watches, which are compared at the end though their optimizer is gone
_LOOKS = (2, 3, 4, 8)  # batches of a run, before each of which the parameters are looked at


class UnwrappedTensorWatch(Watch):
    """Watch over what an optimizer holds that is in no wrapped model.

    Args:
        is_loose: whether no module has any of it, as an attack on samples of this rank, which lasts for one batch: it
            is then compared only where a wrapped model was averaged between two steps.
    """

    unit = "steps"
    way_out = " If it is each rank's own on purpose, say wrap_optimizer(optimizer, apart=True)."

    def __init__(self, world: World, optimizer: Optimizer, key: str, ranks: list[int], is_loose: bool) -> None:
        self._optimizer, self._unwrapped, self._is_loose = ref(optimizer), world.part(Unwrapped), is_loose
        self._models, self._activity, self._averages = world.part(WrappedModels), world.part(Activity), -1
        super().__init__(world, f"what {type(optimizer).__name__} holds outside of wrapped models", key, ranks)

    def average(self) -> None:
        before, self._averages = self._averages, self._activity.averages()[1]
        if not self._is_loose or before != self._averages or self._models.last is None:
            super().average()

    def held(self) -> list[ComparedTensor]:
        """Return the tensors that have had a gradient, and the learning rates if no wrapped model has them too."""
        optimizer = self._optimizer()
        assert optimizer is not None
        rates = [] if parameters_of(optimizer).keys() & self._unwrapped.known() else learning_rates([optimizer])
        trained = [ComparedTensor(name, "", each) for name, each in self._tensors().items() if each.grad is not None]
        return [*rates, *trained]

    def _tensors(self) -> dict[str, nn.Parameter]:
        """Return by name what the optimizer holds in no wrapped model; nothing if it is gone."""
        optimizer, known = self._optimizer(), self._unwrapped.known()
        held = parameters_of(optimizer) if optimizer is not None else {}
        kind, tensors = type(optimizer).__name__, enumerate(held.items())
        return {f"tensor {number} of {kind}": tensor for number, (key, tensor) in tensors if key not in known}

    def end(self) -> None:
        if self._optimizer() is not None:
            self._publish("end", 0)

    def cause_of(self, difference: str) -> str:
        tensors = self._tensors()
        found = next((tensor for name, tensor in tensors.items() if repr(name) in difference), None)
        return "" if found is None else _in_words(found, list(tensors.values()))


class Unwrapped(RunPart):
    """What one run trains on this rank that no strategy wraps.

    Attributes:
        local: models that are each rank's own on purpose.
        per_rank: optimizers whose tensors are each rank's own.
    """

    def __init__(self, world: World) -> None:
        self._world, self._models = world, world.part(WrappedModels)
        self._begun, self._patience = collectives_begun(), _FIRST_SECONDS
        self.local: WeakSet[nn.Module] = WeakSet()
        self.per_rank: WeakSet[Optimizer] = WeakSet()
        self.watches: WeakKeyDictionary[Optimizer, UnwrappedTensorWatch] = WeakKeyDictionary()
        self._latest: deque[UnwrappedTensorWatch] = deque(maxlen=_KEPT)  # also of optimizers that are gone, none loose
        self._keys: Counter[str] = Counter()
        self._batches = 0
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._ledger: Ledger | None = None  # of models without an optimizer: what each was, by batches before

    def known(self) -> set[int]:
        """Return the ids of the parameters of all wrapped models, and of those that are each rank's own on purpose."""
        return {id(parameter) for model in (*self._models, *self.local) for parameter in model.parameters()}

    def is_own(self, optimizer: Optimizer) -> bool:
        """Return whether what an optimizer steps is each rank's own on purpose."""
        local = {id(parameter) for model in self.local for parameter in model.parameters()}
        return optimizer in self.per_rank or not local.isdisjoint(parameters_of(optimizer))

    # Optimizers

    def refuse(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that steps parameters of a module that is not wrapped, if other ranks do so too.

        Raises:
            ModelError: names the module's class, and the line that has made the optimizer.
        """
        held = parameters_of(optimizer)
        modules = _modules()
        model = _model_of(held, modules)
        if model is None or self._world.part(CollectiveGuard).function or _is_torchs(held, modules):
            return
        grads = [tensor.grad for tensor in held.values() if tensor.grad is not None]
        now = collectives_begun()
        may_be_averaged = now is None or now != self._begun
        if not grads and may_be_averaged:  # it computes them in its step, as L-BFGS does
            self._refuse_late(optimizer)
            return
        key = f"unwrapped {type(optimizer).__name__} {self._world.count('an unwrapped optimizer')}"
        kind, mine = type(model).__name__, mix(*map(fingerprint, grads))
        ledger = Ledger(self._world, key, owner=optimizer)
        ledger.publish("first step", mine)

        def is_settled() -> bool:
            theirs = ledger.at("first step")
            unlike = next((rank for rank, other in theirs.items() if other != mine), None)
            if unlike is not None or (theirs and not may_be_averaged):
                raise ModelError(self._refusal(optimizer, kind, unlike))
            return len(theirs) == len(ledger.others)

        if wait_until(is_settled, self._patience):
            say_once(
                f"unwrapped {kind}",
                f"{kind} is not wrapped, and has the same gradients on all ranks: unless you average them "
                f"by hand, all {len(ledger.others) + 1} ranks do the same work. Write model = wrap_model(model) "
                "and loader = shard_loader(loader), and use what they return.",
            )
        else:
            self._patience = _LATER_SECONDS  # this rank trains alone, and may do so again

    def _refuse_late(self, optimizer: Optimizer) -> None:
        def after(stepped: Optimizer, *_: object) -> None:
            handle.remove()
            if any(tensor.grad is not None for tensor in parameters_of(stepped).values()):
                self.refuse(stepped)

        handle = optimizer.register_step_post_hook(after)

    def _refusal(self, optimizer: Optimizer, kind: str, unlike: int | None) -> str:
        made, place = where_made(optimizer), self._world.placement
        return (
            f"rank {place.rank}: this {type(optimizer).__name__}{made and f', made at {made},'} steps {kind}, which "
            f"wrap_model() has not wrapped{'' if unlike is None else f', and rank {unlike} has other gradients'}: each "
            f"of the {place.world_size} ranks would train a {kind} of its own (DW104). Write model = wrap_model(model) "
            "before the loop, in the function that the ranks run, and train what it returns. If each rank is meant to "
            "have its own, as a probe or a player, say model = local_model(model)."
        )

    def watch(self, optimizer: Optimizer, ranks: list[int]) -> None:
        """Watch over what an optimizer holds that is in no wrapped model, where other ranks have one like it."""
        if self._world.channel is not None and optimizer not in self.watches:
            held = parameters_of(optimizer)
            is_loose = held.keys().isdisjoint(self.known()) and _model_of(held, _modules()) is None
            key = self._key(optimizer, held.values())
            self.watches[optimizer] = UnwrappedTensorWatch(self._world, optimizer, key, ranks, is_loose)
            self._latest.extend([] if is_loose else [self.watches[optimizer]])

    def _key(self, thing: object, tensors: Iterable[torch.Tensor]) -> str:
        """Return a key that is alike on ranks that have as many things of this kind."""
        kind = f"{type(thing).__name__} {mix(*(str(tensor.shape) for tensor in tensors)):x}"
        self._keys[kind] += 1
        return f"{kind} {self._keys[kind]}"

    # Without an optimizer

    def first_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the batches of a loader; before the first ones of a run, models without an optimizer are looked at."""
        return batches if self._batches >= _LOOKS[-1] else chain(self._looked_at(batches), batches)

    def _looked_at(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if torch.is_grad_enabled():  # else it is no training
                self._batches += 1
                if self._batches in _LOOKS:
                    self._look()
            yield batch
            if self._batches >= _LOOKS[-1]:
                return

    def train_otherwise(self) -> None:
        """Note that an optimizer steps, or a wrapped model is averaged, and is watched by that."""
        self._batches = _LOOKS[-1]

    def _look(self) -> None:
        """Publish what the models that may be stepped by hand have become, and compare.

        Raises:
            ModelError: a model has changed, and differs between ranks.
        """
        if self._world.part(Activity).averages()[1]:
            self.train_otherwise()
        elif not self._world.part(CollectiveGuard).function:
            self._ledger = self._ledger or Ledger(self._world, "by hand")
            for model, parameters in self._without_optimizer().items():
                if model not in self._names:
                    self._names[model] = self._key(model, parameters)
                name, now = self._names[model], mix(*map(fingerprint, parameters))
                self._ledger.publish(name, {**self._ledger.own.get(name, {}), str(self._batches): now})
            self._compare(self._ledger)

    def _compare(self, ledger: Ledger) -> None:
        place = self._world.placement
        for name, rank in product(ledger.own, ledger.others):
            mine, theirs = ledger.own[name], ledger.of(rank).get(name, {})
            both = [batches for batches in mine if batches in theirs]
            changed = all(len({seen[batches] for batches in both}) > 1 for seen in (mine, theirs))
            if changed and mine[both[-1]] != theirs[both[-1]]:  # else nobody trains it, or one rank alone
                kind = name.split()[0]
                raise ModelError(
                    f"rank {place.rank}: the weights of {kind}, which wrap_model() has not wrapped, have changed, and "
                    f"differ from those of rank {rank}: no optimizer holds them, so the loop updates them by hand, and "
                    f"each of the {place.world_size} ranks trains a {kind} of its own (DW104). Write model = "
                    "wrap_model(model) before the loop, and train what it returns. If each rank is to have its own, "
                    "say model = local_model(model)."
                )

    def _without_optimizer(self) -> dict[nn.Module, list[nn.Parameter]]:
        """Return the outermost modules with parameters that a step by hand may train, and these."""
        found, simulated, known = instances(nn.Module, Optimizer), simulation(), self.known()
        modules = [each for each in found if isinstance(each, nn.Module) and not _is_released(each)]
        for optimizer in found:
            if isinstance(optimizer, Optimizer):
                known |= parameters_of(optimizer).keys()
        inner = {id(part) for module in modules for part in module.children()}
        left = {
            module: [each for each in module.parameters() if _may_be_stepped(each) and id(each) not in known]
            for module in modules
            if id(module) not in inner and (simulated is None or simulated.has_made(module))
        }
        return {module: parameters for module, parameters in left.items() if parameters}

    def wait(self) -> None:
        if self._ledger is not None:
            self._compare(self._ledger)
        watches = dict.fromkeys([*self.watches.values(), *self._latest])
        for watch in watches:
            watch.end()
        for watch in watches:
            watch.comparison.finish()


def _modules() -> list[nn.Module]:
    """Return the modules of this process that can be looked at."""
    return [each for each in instances(nn.Module) if not _is_released(each)]


def _is_released(module: nn.Module) -> bool:
    """Return whether a module is a wrapper of ours without its model: not built, or of a run that has ended."""
    return isinstance(module, TransparentModule) and "_distwrap_model" not in vars(module)


def _may_be_stepped(parameter: nn.Parameter) -> bool:
    """Return whether a loop may step a parameter by hand; a look at a part of a divided one is a collective."""
    return type(parameter) is nn.Parameter and parameter.requires_grad and not parameter.is_meta


def _model_of(held: dict[int, nn.Parameter], modules: list[nn.Module]) -> nn.Module | None:
    """Return the smallest module that has all of an optimizer's parameters, or the most; ``None`` if none has any."""
    counted = []
    for module in modules:
        own = [id(parameter) for parameter in module.parameters()]
        if common := len(held.keys() & set(own)):
            counted.append((common, -len(own), len(list(module.modules())), module))
    return max(counted, key=lambda each: each[:3])[3] if counted else None


def _is_torchs(held: dict[int, nn.Parameter], modules: list[nn.Module]) -> bool:
    """Return whether a wrapper of torch's, which the user has made, exchanges the gradients of these parameters."""
    averaged = {
        id(parameter)
        for module in modules
        if isinstance(module, DistributedDataParallel) or type(module).__name__ == "FullyShardedDataParallel"
        for parameter in module.parameters()
    }
    return bool(held.keys() & averaged) or any(hasattr(tensor, "placements") for tensor in held.values())


def _in_words(tensor: nn.Parameter, beside: list[nn.Parameter]) -> str:
    """Return which module a tensor is of that an optimizer holds beside others, and what to do."""
    model, shape = _model_of({id(each): each for each in beside}, _modules()), tuple(tensor.shape)
    own = {id(each): name for name, each in model.named_parameters()} if model is not None else {}
    name, kind = own.get(id(tensor)), type(model).__name__
    if name is None:
        return f"That tensor, of shape {shape}, is in no module: make it a parameter of the model before wrap_model()."
    return (
        f"That tensor is {name!r} of {kind}, of shape {shape}, and wrap_model() has not wrapped this {kind}, so that "
        "its gradients are not averaged (DW104): wrap it too before the loop, as in head = wrap_model(head), and train "
        "what it returns."
    )
