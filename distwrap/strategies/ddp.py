"""One process a device, gradients averaged during the backward: torch's DistributedDataParallel.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distwrap.collectives import broadcast
from distwrap.group.setup import require_group
from distwrap.group.world import Precision, World
from distwrap.model.wrapped import DistributedModel, DistributedModelInPrecision
from distwrap.precision import in_precision
from distwrap.strategies.single import local


class DDP:
    """The same model in each process."""

    launches = True

    def prepare_model(
        self, model: nn.Module, world: World, device: torch.device, precision: Precision, options: dict[str, Any]
    ) -> nn.Module:
        if world.placement.world_size == 1:
            return local(model, device, precision)
        require_group("wrap_model")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            _share(model)
            return local(model, device, precision)  # nothing to average; DDP would refuse
        if device.type != "cpu":
            options = {"device_ids": [device.index], **options}
        elif precision == "32":
            return _held(DistributedModel(model, **options), world)
        return _held(DistributedModelInPrecision(model, in_precision(precision, device), device, **options), world)

    def prepare_optimizer(self, optimizer: Optimizer, model: nn.Module | None) -> Optimizer:
        return optimizer


def _held(model: DistributedModel, world: World) -> DistributedModel:
    world.models.add(model)
    return model


def _share(model: nn.Module) -> None:
    """Give every rank rank 0's weights, as DDP does when it is built."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.copy_(broadcast(tensor.data))
