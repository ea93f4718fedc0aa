"""One process over all its devices, in threads: torch's DataParallel. DDP is normally faster.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distwrap.errors import ModelError, OptionError
from distwrap.group.devices import visible_devices
from distwrap.group.world import Precision, World
from distwrap.model.wrapped import DataParallelModel
from distwrap.precision import in_precision
from distwrap.strategies.single import local


class DP:
    """The batch split over the devices of this process; with one device or none, the model as it is."""

    launches = False

    def prepare_model(
        self, model: nn.Module, world: World, device: torch.device, precision: Precision, options: dict[str, Any]
    ) -> nn.Module:
        if options:
            raise OptionError(f"strategy='dp' takes none of DDP's options, but got {', '.join(options)}.")
        if world.placement.world_size > 1:
            raise ModelError(
                f"strategy='dp' is one process over several devices, but this world has {world.placement.world_size} "
                f"ranks. Use strategy='ddp', or start one process."
            )
        count = visible_devices().count
        if count < 2 or device.type == "cpu":
            return local(model, device, precision)
        return DataParallelModel(model, in_precision(precision, device), range(count))

    def prepare_optimizer(self, optimizer: Optimizer, model: nn.Module | None) -> Optimizer:
        return optimizer
