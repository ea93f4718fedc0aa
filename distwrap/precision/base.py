"""The protocol of precisions; the base is full precision, in which there is nothing to do."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distwrap._internals.torch_tree import map_tensors


class Precision:
    """Full precision, ``"32"``; subclass it, and override what differs in another precision.

    A precision is chosen in the caller and travels to the ranks, so it must be picklable. Its methods are called in
    this order: `weights` once, when a model is wrapped; `inputs`, `context`, `outputs` and `require_scaled` around each
    forward; `after_step` after each step of an optimizer.

    Attributes:
        is_plain: whether a forward is the model's own, with nothing around it.

    Example:
        >>> class Doubled(Precision):
        ...     def outputs(self, value):
        ...         return value.double()
        >>> Doubled().outputs(torch.ones(1)).dtype
        torch.float64
    """

    is_plain = False

    def weights(self, model: nn.Module) -> nn.Module:
        """Return the model with its weights in the type in which they are trained."""
        return model

    def inputs(self, value: Any) -> Any:
        """Return a forward's inputs, in any nesting, in the type that the model takes."""
        return value

    def context(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context in which a forward runs."""
        return nullcontext()

    def outputs(self, value: Any) -> Any:
        """Return a forward's outputs, in any nesting, in the type in which a loss is computed."""
        return map_tensors(_to_float32, value)

    def require_scaled(self, outputs: Any) -> None:
        """Refuse a backward from a forward's outputs with a loss that is not scaled, unless the strategy scales."""

    def make_scaler(self, device: torch.device) -> torch.amp.GradScaler | None:
        """Return a scaler of losses, where gradients would be too small without one."""
        return None

    def after_step(self, optimizer: Optimizer) -> None:
        """Act after a step of an optimizer of models in this precision; only called where a subclass overrides it."""

    def __repr__(self) -> str:
        return type(self).__name__


class FullPrecision(Precision):
    """Weights, inputs and outputs as they are."""

    is_plain = True

    def outputs(self, value: Any) -> Any:
        return value


def _to_float32(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
