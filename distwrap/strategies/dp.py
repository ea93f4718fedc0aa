"""The strategy dp: one process that uses all its devices in threads, with torch's DataParallel. DDP is usually faster.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html
"""

import torch
from torch import nn
from torch.nn.parallel.comm import scatter

from distwrap.devices.selection import visible_devices
from distwrap.errors import ModelError, OptionError
from distwrap.group.world import World
from distwrap.model.distributed import DataParallelModel, DataParallelRouting
from distwrap.strategies.base import Strategy, Wrapping
from distwrap.strategies.single import local


def check_over_devices(strategy: str) -> None:
    """Refuse a strategy of one process with several devices, if torch cannot divide batches over them.

    Raises:
        ModelError: torch cannot; the message says what to use.
    """
    seen = visible_devices()
    try:
        scatter(torch.zeros(seen.count, device=seen.kind), list(range(seen.count)))  # type: ignore[no-untyped-call]
    except AttributeError:  # only some builds of torch and vendors' packages have it
        raise ModelError(
            f"strategy={strategy!r} divides a batch over the {seen.count} {seen.kind} devices by torch's "
            "DataParallel, which torch does not have for this type of device. Use strategy='ddp', with a "
            "process for each device, or show each process one device."
        ) from None


class DPStrategy(Strategy):
    """Strategy that splits the batch over the devices of this process; with at most one, the model is unchanged."""

    launches = "one"

    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        if wrapping.options:
            raise OptionError(f"strategy='dp' takes none of DDP's options, but got {', '.join(wrapping.options)}.")
        if world.placement.world_size > 1:
            raise ModelError(
                f"strategy='dp' is one process over several devices, but this world has {world.placement.world_size} "
                f"ranks. Use strategy='ddp', or start one process."
            )
        count = visible_devices().count
        if count < 2 or wrapping.device.type == "cpu":
            return local(model, wrapping)
        check_over_devices("dp")
        routing = DataParallelRouting(model, wrapping.in_precision, range(count), wrapping.forward_methods)
        return DataParallelModel(routing)
