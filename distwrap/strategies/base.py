"""What a strategy is: how a model and its optimizer are prepared for this run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from distwrap.group.world import World
from distwrap.model.methods import ForwardMethods
from distwrap.precision import InPrecision


@dataclass(frozen=True)
class Wrapping:
    """How a model is to be wrapped.

    Attributes:
        device: where it is.
        in_precision: how it computes.
        forward_methods: which of its methods may run a forward.
        options: for the strategy, as ``find_unused_parameters`` for DDP.
    """

    device: torch.device
    in_precision: InPrecision
    forward_methods: ForwardMethods
    options: dict[str, Any]


class Strategy(Protocol):
    """One way to replicate a model.

    Attributes:
        launches: whether it wants a process a device. Where not, the decorated function runs in the caller's process.
    """

    launches: bool

    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        """Return the model that the loop trains; it is on its device, and in its weights' type."""

    def prepare_optimizer(self, optimizer: Optimizer, model: nn.Module | None) -> Optimizer:
        """Return the optimizer that the loop steps."""
