"""A precision on a device, around forwards."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch

from distwrap.group.world import RunPart, World, current_world
from distwrap.protocols import Precision
from distwrap.registry import precisions

Forward = Callable[..., Any]


class InPrecision:
    """Precision bound to a device; called with a forward, it returns that forward in the precision.

    Args:
        precision: a `Precision`, or the name of one.
        device: on which the forward computes.
        owns_scale: whether the strategy scales losses by itself.

    Attributes:
        changes_inputs: whether a forward's inputs may come out of `inputs` as others.
    """

    def __init__(self, precision: str | Precision, device: torch.device, *, owns_scale: bool = False) -> None:
        self.precision: Precision = precisions.make(precision)
        self.device, self._owns_scale = device, owns_scale
        self.is_plain, self.inputs = self.precision.is_plain, self.precision.inputs
        self.changes_inputs = getattr(type(self.precision), "inputs", None) is not Precision.inputs

    def __call__(self, forward: Forward) -> Forward:
        if self.is_plain:
            return forward

        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.inputs((args, kwargs))
            with self.context():
                outputs = forward(*args, **kwargs)
            return self.outputs(outputs)

        return run

    def outputs(self, value: Any) -> Any:
        """Return a forward's outputs in the type in which a loss is computed."""
        value = self.precision.outputs(value)
        if not self._owns_scale and hasattr(self.precision, "require_scaled"):  # a subclass of Precision has it
            self.precision.require_scaled(value)
        return value

    def make_scaler(self) -> torch.amp.GradScaler | None:
        """Return a scaler of losses, where distwrap is to scale them."""
        scaler = None if self._owns_scale else self.precision.make_scaler(self.device)
        return scaler if scaler is not None and scaler.is_enabled() else None

    def context(self) -> AbstractContextManager[Any]:
        """Return the context in which a forward runs."""
        return self.precision.context(self.device)


class RunPrecision(RunPart):
    """The precision of one run, on its device."""

    def __init__(self, world: World) -> None:
        self.chosen = InPrecision(world.options.precision, world.device)


def autocast() -> AbstractContextManager[Any]:
    """Compute in the precision of this run within a ``with``, for code outside of a wrapped model's forward.

    Example:
        >>> with autocast():
        ...     loss = torch.ones(2, 2) @ torch.ones(2)
    """
    return current_world().part(RunPrecision).chosen.context()
