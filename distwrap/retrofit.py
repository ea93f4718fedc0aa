"""Make a plain function distributed: wrap its arguments, and copy what was trained back into the caller's objects.

Models, optimizers, schedulers, scalers and loaders are found among the arguments, also inside lists, tuples and dicts
and in the attributes of objects, of which a method's own is one, in the same order in the caller and on every rank; so
the n-th state that comes back belongs to the n-th object. Attributes hold the wrapped ones while the function runs.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from distwrap._internals.torch import mark_steps_as_watched
from distwrap.data.loader import next_epoch, shard_loader
from distwrap.errors import ModelError, OptionError
from distwrap.group.world import current_world
from distwrap.model import TransparentModule
from distwrap.model.checks.optimizers import Optimizers
from distwrap.model.wrapped_models import bound_strategy
from distwrap.nesting import rebuilt
from distwrap.strategies import Strategy, wrap_model, wrap_optimizer

_KINDS = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler, DataLoader)
_CLOSED = (*_KINDS, torch.Tensor, Dataset, FunctionType, ModuleType, type)  # into which nobody looks
_EPOCH = "_distwrap_next_epoch"  # what the caller's own loader remembers from call to call


@dataclass
class Retrofitted:
    """Object among the arguments: the caller's own, the wrapped one that the function saw, and what a strategy says."""

    original: Any
    wrapped: Any
    trained: Any = None

    def finish(self) -> None:
        """Put what was trained into the original, where it has not been trained in place; every rank calls it."""
        strategy = bound_strategy(self.wrapped)
        replaced = isinstance(self.original, Optimizer) and self.wrapped is not self.original
        is_own = strategy is not None and (
            strategy.is_divided(self.wrapped) or type(strategy).state is not Strategy.state
        )
        if strategy is not None and (replaced or is_own):
            self.trained = strategy.state(self.wrapped, everywhere=True)
        divided = strategy is not None and strategy.shards and isinstance(self.original, Optimizer)
        changed = self.trained is not None and (self.wrapped is not self.original or divided)
        if isinstance(self.original, DataLoader) or changed:
            self.load(self.state())  # where this process is the caller's own, nobody else brings it home

    def state(self) -> Any:
        """Return what training changed, without the wrapper's marks."""
        if isinstance(self.original, DataLoader):
            return next_epoch(self.wrapped)
        state = self.original.state_dict() if self.trained is None else self.trained
        if isinstance(self.original, nn.Module):
            flags = [parameter.requires_grad for parameter in self.original.parameters()]
            return state, [module.training for module in self.original.modules()], flags
        return state

    def load(self, state: Any) -> None:
        """Put the state into the caller's own object."""
        if isinstance(self.original, DataLoader):
            self.original.__dict__[_EPOCH] = state
            return
        if isinstance(self.original, nn.Module):
            weights, training, trained = state
            differing = sorted(_shapes(weights) ^ _shapes(self.original.state_dict()))
            if differing:
                raise ModelError(
                    f"retrofit: the function changed the structure of {type(self.original).__name__}, so its "
                    f"weights do not fit the caller's model, which was left as it was: {differing[0][0]!r} "
                    "differs. Return the model instead."
                )
            self._restore_original(weights)
            for module, flag in zip(self.original.modules(), training, strict=False):
                module.training = flag
            for parameter, flag in zip(self.original.parameters(), trained, strict=False):
                parameter.requires_grad_(flag)
        else:
            self._restore_original(state)

    def _restore_original(self, state: Any) -> None:
        strategy = bound_strategy(self.wrapped)
        if strategy is None:
            self.original.load_state_dict(state)
        else:
            strategy.restore_original(self.original, self.wrapped, state)


def _shapes(state: dict[str, Any]) -> set[tuple[str, tuple[int, ...]]]:
    return {(name, tuple(value.shape) if isinstance(value, torch.Tensor) else ()) for name, value in state.items()}


def find(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Retrofitted]:
    """List the call's models, optimizers, schedulers, scalers and loaders, each once, in a fixed order.

    Raises:
        OptionError: one is in a container that has no order in which it could be replaced.
    """
    found: dict[int, Retrofitted] = {}

    def note(part: Any) -> Any:
        if isinstance(part, _KINDS):
            found.setdefault(id(part), Retrofitted(part, part))
        elif isinstance(part, (set, frozenset, deque)):
            for item in part:
                if isinstance(item, _KINDS):
                    raise OptionError(
                        f"retrofit: {type(item).__name__} is in a {type(part).__name__}, where it cannot be replaced "
                        f"by a wrapped one, so each rank would train alone. Put it into a list."
                    )
        return part

    _replace((_owner(function), args, kwargs), note)
    return list(found.values())


def wrap(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[Retrofitted]]:
    """Wrap what `find` finds, and return the call with it in place, until `take_back`."""
    found = find(function, args, kwargs)
    models = [item for item in found if isinstance(item.original, nn.Module)]
    _refuse_shared(models)
    if current_world().placement.world_size > 1:
        current_world().part(Optimizers)  # which notices what is trained and was not found, as out of a closure
    for item in models:
        if not isinstance(item.original, TransparentModule):  # a decorated function that calls another
            trains = any(True for _ in item.original.parameters())
            item.wrapped = wrap_model(item.original, precision=None if trains else "32")  # a loss computes in float32
    for item in found:
        if isinstance(item.original, Optimizer):
            item.wrapped = wrap_optimizer(item.original)
        elif isinstance(item.original, LRScheduler):
            mark_steps_as_watched(item.original.optimizer)
        elif isinstance(item.original, DataLoader):
            item.wrapped = shard_loader(item.original)
            if item.original.__dict__.get(_EPOCH):  # a call before this one has seen the first epochs' orders
                item.wrapped.set_epoch(item.original.__dict__[_EPOCH])
    wrapped = {id(item.original): item.wrapped for item in found}
    call = (_owner(function), args, kwargs)
    owner, args, kwargs = _replace(call, lambda part: wrapped.get(id(part), part))
    return MethodType(function.__func__, owner) if isinstance(function, MethodType) else owner, args, kwargs, found


def unwrapped(value: Any, found: list[Retrofitted]) -> Any:
    """Replace what the function saw by the caller's own objects, in what it returns."""
    originals = {id(item.wrapped): item.original for item in found}
    return _replace(value, lambda part: originals.get(id(part), part))


def take_back(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], found: list[Retrofitted]
) -> None:
    """Put the caller's own objects back into the attributes that `wrap` has changed."""
    unwrapped((_owner(function), args, kwargs), found)


def _owner(function: Callable[..., Any]) -> Any:
    """Return the object of a method; any other callable itself, which may hold models too."""
    return function.__self__ if isinstance(function, MethodType) else function


def _replace(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a nesting with some of its parts replaced; an attribute of an object in it is replaced in place."""
    objects: dict[int, Any] = {}

    def visit(part: Any, path: tuple[Any, ...]) -> Any:
        changed = change(part)
        if changed is part and type(part).__module__ != "builtins" and not issubclass(type(part), _CLOSED):
            objects.setdefault(id(part), part)
        return changed

    value = rebuilt(value, visit)
    seen = 0
    while seen < len(objects):  # looking into one finds others
        for part in list(objects.values())[seen:]:
            seen += 1
            for held, put in _attributes(part):
                changed = rebuilt(held, visit)
                if changed is not held:
                    put(changed)
    return value


def _attributes(part: Any) -> Iterator[tuple[Any, Callable[[Any], None]]]:
    """Yield the values of an object's attributes, each with the function that puts another in its place."""
    with suppress(AttributeError):
        own = object.__getattribute__(part, "__dict__")
        for name, held in list(own.items()):
            yield held, partial(own.__setitem__, name)
    for cls in type(part).__mro__:
        for slot in vars(cls).values() if "__slots__" in vars(cls) else ():
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):
                    yield slot.__get__(part), partial(slot.__set__, part)


def _refuse_shared(models: list[Retrofitted]) -> None:
    owner: dict[int, Retrofitted] = {}
    for item in models:
        for parameter in item.original.parameters():
            other = owner.setdefault(id(parameter), item)
            if other is not item and parameter.requires_grad:
                raise ModelError(
                    f"retrofit: the arguments {type(other.original).__name__} and {type(item.original).__name__} share "
                    f"parameters, so their gradients would be exchanged twice. Pass the outer one alone."
                )
