"""One process, one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distwrap.errors import ModelError
from distwrap.group.world import Precision, World
from distwrap.model.wrapped import LocalModel
from distwrap.precision import in_precision


class Single:
    """The user's own model: wrapped only where precision or device ask for it."""

    launches = False

    def prepare_model(
        self, model: nn.Module, world: World, device: torch.device, precision: Precision, options: dict[str, Any]
    ) -> nn.Module:
        if world.placement.world_size > 1:
            raise ModelError(
                f"strategy='single' in a world of {world.placement.world_size} ranks would train as many models apart. "
                f"Use strategy='ddp', or start one process."
            )
        return local(model, device, precision)

    def prepare_optimizer(self, optimizer: Optimizer, model: nn.Module | None) -> Optimizer:
        return optimizer


def local(model: nn.Module, device: torch.device, precision: Precision) -> nn.Module:
    """Put a model on the device; wrap it only where there is something to do at a forward."""
    if precision == "32" and device.type == "cpu":
        return model
    return LocalModel(model, in_precision(precision, device), device)
