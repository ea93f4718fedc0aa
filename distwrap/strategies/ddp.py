"""One process a device, gradients averaged during the backward: torch's DistributedDataParallel.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from distwrap.collectives import broadcast
from distwrap.group.setup import require_group
from distwrap.group.world import World
from distwrap.model.buffers import Buffers
from distwrap.model.distributed import DistributedModel
from distwrap.model.first_step import watch_first_step
from distwrap.model.transparent import unwrap_model
from distwrap.strategies.base import Wrapping
from distwrap.strategies.single import local

# By which the user decides when buffers are broadcast; the second name is torch's since 2.13.
_BROADCAST = {"broadcast_buffers", "forward_sync_buffers"}


class DDP:
    """The same model in each process."""

    launches = True

    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        if world.placement.world_size == 1:
            return local(model, wrapping)
        require_group("wrap_model")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            _share(model)
            return local(model, wrapping)  # nothing to average; DDP would refuse
        for other in list(world.models):
            if unwrap_model(other) is unwrap_model(model):
                other.retire()
        options = wrapping.options
        if wrapping.device.type != "cpu":
            options = {"device_ids": [wrapping.device.index], **options}
        buffers = None
        world.wrapped += 1
        if world.channel is not None and not _BROADCAST.intersection(options):
            buffers = Buffers(unwrap_model(model), world.placement.rank, world.channel, f"{world.wrapped}")
        wrapped = DistributedModel(
            model, wrapping.in_precision, wrapping.device, wrapping.forward_methods, buffers, **options
        )
        world.models.add(wrapped)
        watch_first_step(world)
        return wrapped

    def prepare_optimizer(self, optimizer: Optimizer, model: nn.Module | None) -> Optimizer:
        return optimizer


def _share(model: nn.Module) -> None:
    """Give every rank rank 0's weights, as DDP does when it is built."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.copy_(broadcast(tensor.data))
