"""Binding of a model, or an optimizer, to the strategy that prepared it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from distwrap._internals.torch import compiled_module

if TYPE_CHECKING:
    from distwrap.strategies.base import Strategy

_MARK = "_distwrap_strategy"


def bind(thing: Any, strategy: Strategy) -> None:
    """Mark a model or an optimizer with the strategy that prepared it. Copies and pickles do not carry the mark."""
    thing.__dict__[_MARK] = strategy


def bound_strategy(thing: Any) -> Strategy | None:
    """Return the strategy that prepared a model or an optimizer; ``None`` where none has.

    It is also found where a wrapped model was compiled around its wrapper.
    """
    while True:
        own = getattr(thing, "__dict__", {})
        if _MARK in own:
            found: Strategy = own[_MARK]
            return found
        inner = compiled_module(thing)
        if inner is None:
            return None
        thing = inner


def under_ddp(model: Any) -> DistributedDataParallel | None:
    """Return the DDP in a model that may be compiled around it; ``None`` where there is none."""
    while not issubclass(type(model), DistributedDataParallel):
        model = compiled_module(model)
        if model is None:
            return None
    return model  # type: ignore[no-any-return]
