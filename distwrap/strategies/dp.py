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
from distwrap.strategies.single import check_ddp_options, local


def divides_batches(strategy: str, device: torch.device) -> bool:
    """Return whether a strategy has several devices in this process, over which torch divides batches.

    Raises:
        ModelError: torch cannot; the message says what to use.
    """
    seen = visible_devices()
    if seen.count < 2 or device.type == "cpu":
        return False
    try:
        scatter(torch.zeros(seen.count, device=seen.kind), list(range(seen.count)))  # type: ignore[no-untyped-call]
    except AttributeError:  # only some builds of torch and vendors' packages have it
        raise ModelError(
            f"strategy={strategy!r} divides a batch over the {seen.count} {seen.kind} devices by torch's "
            "DataParallel, which torch does not have for this type of device. Use strategy='ddp', with a "
            "process for each device, or show each process one device."
        ) from None
    return True


def over_devices(strategy: str, model: nn.Module, wrapping: Wrapping) -> nn.Module:
    """Wrap a model of a world of one rank over all devices of this process; raise as `divides_batches` does."""
    if not divides_batches(strategy, wrapping.device):
        return local(model, wrapping)
    check_ddp_options("wrap_model()", wrapping.options)
    devices = range(visible_devices().count)
    return DataParallelModel(DataParallelRouting(model, wrapping.in_precision, devices, wrapping.forward_methods))


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
        return over_devices("dp", model, wrapping)
