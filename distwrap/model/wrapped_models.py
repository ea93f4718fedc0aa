"""The models of a run in the order in which they were wrapped, and the strategy of each model and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from distwrap._internals.torch import ASKED_BY_DDP, compiled_module
from distwrap.errors import ModelError
from distwrap.group.collective_guard import CollectiveGuard
from distwrap.group.collectives import gather_object
from distwrap.group.world import RunPart, World, current_world
from distwrap.model.forward_routing import Routing
from distwrap.model.transparent import TransparentModule, put_model_first, unwrap_model
from distwrap.protocols import Strategy

T = TypeVar("T")

_MARK = "_distwrap_strategy"


@dataclass(eq=False)
class Handle:
    """What a run keeps for one wrapped model; `handle_of` finds it.

    Attributes:
        routing: the calls of its methods, and torch's wrapper in it.
        gradients: the watch over gradients that DDP averages, a `Gradients`.
        buffers: those that ranks take over from rank 0 when training pauses, a `Buffers`.
        exchange: with the other ranks under ``comm=``, an `Exchange` of `distwrap.comm`.
        alignment: the forwards of a divided model, in which all ranks take part, a `Rendezvous` of
            `distwrap.strategies`.
        tensor_parallel: the division of its blocks, if they are divided; its ``repr`` is a table of them.
        sync_buffers: gives all ranks the same buffers, for a model of which no rank has all.
        restore_original: restores the user's module, with the numbers of a full state, for a model that was changed.
    """

    routing: Routing
    gradients: Any = None
    buffers: Any = None
    exchange: Any = None
    alignment: Any = None
    tensor_parallel: object | None = None
    sync_buffers: Callable[[str], None] | None = None
    restore_original: Callable[[dict[str, Any]], None] | None = None

    def end_exchange(self) -> None:
        """End the exchange of an algorithm, as where the same model is wrapped anew."""
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.close()


class WrappedModels(RunPart):
    """Wrapped models of one run; they keep the process group alive until the run ends.

    Iterating yields those that somebody still holds, the same on every rank where all ranks hold the same.

    Attributes:
        handles: what is kept for each wrapper, also for one without parameters to train, over which nothing iterates.
        on_added: called with each model that is wrapped from now on.
        bound: the strategies of what is the caller's own, and outlives the run: optimizers, and models that a strategy
            has prepared without a wrapper.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._models: list[ref[nn.Module]] = []
        self._guard = world.part(CollectiveGuard)
        self._users: dict[int, ref[nn.Module]] = {}
        self.on_added: list[Callable[[nn.Module], None]] = []
        self.handles: WeakKeyDictionary[nn.Module, Handle] = WeakKeyDictionary()
        self.bound: WeakKeyDictionary[nn.Module | Optimizer, Strategy] = WeakKeyDictionary()
        self._optimizers: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # and their numbers

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([model for held in self._models if (model := held()) is not None])

    @property
    def last(self) -> nn.Module | None:
        """The model that was wrapped last, of those that still exist."""
        return next((model for held in reversed(self._models) if (model := held()) is not None), None)

    def of_optimizer(self, optimizer: Optimizer) -> list[nn.Module]:
        """Return the models that have parameters of an optimizer."""
        held = parameters_of(optimizer).keys()
        return [model for model in self if not held.isdisjoint(map(id, model.parameters()))]

    def optimizers_of_all_ranks(self) -> list[Optimizer]:
        """Return the optimizers of wrapped models that every rank still has, in one order; every rank calls it."""
        return held_by_all({number: optimizer for optimizer, number in self._optimizers.items()})

    def bind(self, thing: nn.Module | Optimizer, strategy: Strategy) -> None:
        """Note the strategy of an optimizer or of a model of the user's own, for this run."""
        if isinstance(thing, Optimizer) and thing not in self._optimizers:
            self._optimizers[thing] = self._world.count("optimizer")
        self.bound[thing] = strategy

    def add(self, model: nn.Module) -> None:
        """Note a model that was wrapped just now."""
        self._models = [ref(other) for other in self if other is not model] + [ref(model)]
        self._guard.models.add(under_ddp(model) or model)
        users = unwrap_model(model)
        self._users = {key: held for key, held in self._users.items() if held() is not None} | {id(users): ref(users)}
        for call in self.on_added:
            call(model)

    def gradients(self) -> Iterator[tuple[nn.Module, Any]]:
        """Yield each model whose gradients DDP averages, with the watch over them, a `Gradients`."""
        yield from ((model, each.gradients) for model, each in self.handles.items() if each.gradients is not None)

    def has_wrapped(self, users: nn.Module) -> bool:
        """Return whether a model of the user's was wrapped in this run."""
        held = self._users.get(id(users))
        return held is not None and held() is users

    def close(self) -> None:
        """Let the models go on as bare ones, without the process group, unless that is the user's, which stays.

        There a model goes on under DDP, but not under an algorithm of ``comm=``, which was the run's.
        """
        for model, gradients in list(self.gradients()):
            handle = self.handles[model]
            if self._world.group is not None:
                gradients.forget()
                handle.end_exchange()
                released: Any = model
                released._distwrap_release()
            elif handle.exchange is not None:
                handle.routing.look_with(_refuse_training)


def _refuse_training(_: object) -> None:
    if torch.is_grad_enabled():
        raise ModelError(
            "this model was wrapped under comm= in a run that has ended, and so has the exchange with the other ranks: "
            "each would train a model of its own (DW104). Wrap it again: model = wrap_model(unwrap_model(model))."
        )


def bind(thing: nn.Module | Optimizer, strategy: Strategy, *, own: bool = False) -> None:
    """Note the strategy of a wrapper, or for this run that of an optimizer or of a model of the user's `own`."""
    if own or isinstance(thing, Optimizer):
        current_world().part(WrappedModels).bind(thing, strategy)
    else:
        thing.__dict__[_MARK] = strategy


def unbind(wrapper: nn.Module) -> None:
    """Note that a wrapper is of no use any more: its model is the caller's again."""
    wrapper.__dict__.pop(_MARK, None)


def bound_strategy(thing: Any) -> Strategy | None:
    """Return the strategy of a model, or of an optimizer of a model's parameters; ``None`` where there is none.

    It is also found where a wrapped model was compiled around its wrapper.
    """
    world = current_world()
    models = world.part(WrappedModels)
    if isinstance(thing, Optimizer):
        if thing not in models.bound and (owners := models.of_optimizer(thing)):
            bind(thing, min((strategy_of(owner, world) for owner in owners), key=lambda each: not each.shards))
        return models.bound.get(thing)
    while isinstance(thing, nn.Module):
        found = thing.__dict__.get(_MARK) or models.bound.get(thing)
        if found is not None:
            return found
        thing = compiled_module(thing)
    return None


def handle_of(model: object) -> Handle | None:
    """Return what the run keeps for a wrapped model, also where it was compiled around its wrapper; else ``None``."""
    handles = current_world().part(WrappedModels).handles
    while isinstance(model, nn.Module):
        if (found := handles.get(model)) is not None:
            return found
        model = compiled_module(model)
    return None


def routing_of(model: object) -> Any:
    """Return the `Routing` of a wrapped model; ``None`` where there is none."""
    return getattr(handle_of(model), "routing", None)


def gradients_of(model: object) -> Any:
    """Return the `Gradients` of a model under DDP; ``None`` where there are none."""
    return getattr(handle_of(model), "gradients", None)


def strategy_of(thing: nn.Module | Optimizer | None, world: World) -> Strategy:
    """Return the strategy of a model or an optimizer; the run's where there is none."""
    found = bound_strategy(thing)
    return found if found is not None else world.strategy


def held_by_all(things: Mapping[int, T]) -> list[T]:
    """Return what every rank still holds of things with the same numbers everywhere, by number; every rank calls it.

    What nobody refers to may be gone on one rank, and wait for the garbage collector on another.
    """
    everyones = gather_object(sorted(things))
    return [things[number] for number in everyones[0] if all(number in each for each in everyones)]


def parameters_of(optimizer: Optimizer) -> dict[int, nn.Parameter]:
    """Return the parameters that an optimizer steps, by their ids."""
    return {id(tensor): tensor for group in optimizer.param_groups for tensor in group["params"]}


def under_ddp(model: Any) -> DistributedDataParallel | None:
    """Return torch's DDP in a model that may be compiled around it; ``None`` where there is none."""
    while model is not None and not issubclass(type(model), DistributedDataParallel):
        model = compiled_module(model)
    routing = routing_of(model)
    return model if routing is None else routing.inner  # type: ignore[no-any-return]


class ModelProxy(TransparentModule):
    """Wrapper whose calls go through a `Routing`; whatever is set on it is the model's, or torch's wrapper's.

    Args:
        routing: of the model.
        **parts: what the run's `Handle` of the model has beside it.
    """

    _distwrap_routing: Any  # which only the wrapper itself reads; others have `handle_of`

    def __init__(self, routing: Routing, **parts: Any) -> None:
        self._distwrap_go_through(routing, type(self))
        current_world().part(WrappedModels).handles[self] = Handle(routing, buffers=routing.buffers, **parts)

    def _distwrap_go_through(self, routing: Routing, kind: type) -> None:
        """Let calls go through a routing from now on, and be a wrapper of another kind."""
        own = {"module": routing.module, "_distwrap_model": routing.model, "_distwrap_inner": routing.inner}
        self.__dict__.update(own, _distwrap_routing=routing)
        put_model_first(self, kind)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        routing = self._distwrap_routing
        return (routing.dressed or routing.forward)(*args, **kwargs)

    def _distwrap_method(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        return self._distwrap_routing.looked_up(name, method)  # type: ignore[no-any-return]

    def train(self, mode: bool = True) -> Any:
        """Set the training flag; when training pauses, take over rank 0's buffers."""
        pauses = self.training and not mode
        super().train(mode)
        self._distwrap_routing.train(mode, pauses=pauses)
        return self

    def __getattr__(self, name: str) -> Any:
        if name == ASKED_BY_DDP:
            raise ModelError(
                f"DistributedDataParallel got a {type(self._distwrap_model).__name__} that wrap_model() has wrapped, "
                "which exchanges its gradients already. Use what wrap_model() returns as it is."
            )
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._distwrap_set(name, value)


class UncopiedModel(ModelProxy):
    """Wrapper that can be neither copied nor pickled; its routing says why, by ``refuse_copy()``."""

    def __init__(self, routing: Any, **parts: Any) -> None:
        super().__init__(routing, alignment=routing.alignment, **parts)

    def __deepcopy__(self, memo: Any) -> Any:
        return self._distwrap_routing.refuse_copy()

    def __copy__(self) -> Any:
        return self._distwrap_routing.refuse_copy()

    def __reduce__(self) -> Any:
        return self._distwrap_routing.refuse_copy()
