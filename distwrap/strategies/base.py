"""What a strategy is: how a model and its optimizer are prepared for this run."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from distwrap.group.world import Precision, World


class Strategy(Protocol):
    """One way to replicate a model.

    Attributes:
        launches: whether it wants a process a device. Where not, the decorated function runs in the caller's process.
    """

    launches: bool

    def prepare_model(
        self, model: nn.Module, world: World, device: torch.device, precision: Precision, options: dict[str, Any]
    ) -> nn.Module:
        """Return the model that the loop trains."""

    def prepare_optimizer(self, optimizer: Optimizer, model: nn.Module | None) -> Optimizer:
        """Return the optimizer that the loop steps."""
