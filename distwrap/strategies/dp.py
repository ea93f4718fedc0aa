"""The strategies dp and ddp2: a process uses all its devices in threads, by DataParallel. DDP is usually faster.

Under ddp2, formerly Lightning's, each node has such a process, in full precision. Between the nodes it is DDP, with any
algorithm of exchange; on one node it is DataParallel alone. On the CPU, or with one device a node, it is DDP with one
process a node.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html
"""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import data_parallel
from torch.nn.parallel.comm import scatter

from distwrap._internals.torch import DDPSteps
from distwrap.devices.selection import visible_devices
from distwrap.errors import ModelError, OptionError
from distwrap.group.world import World
from distwrap.model.distributed import (
    AveragingModel,
    AveragingReplica,
    DataParallelModel,
    DataParallelRouting,
    DistributedModel,
    ReplicaModel,
)
from distwrap.protocols import Algorithm
from distwrap.strategies.base import Strategy, Wrapping
from distwrap.strategies.ddp import DDPStrategy
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


class DDP2Strategy(DDPStrategy):
    """DDP between nodes, and DataParallel within a node; takes DDP's options."""

    launches = "node"

    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        if world.placement.local_world_size > 1:
            raise OptionError(
                "strategy='ddp2' runs one process on each node, and this node has "
                f"{world.placement.local_world_size}. Start one on each node (srun --ntasks-per-node=1, "
                "torchrun --nproc-per-node=1), or use strategy='ddp'."
            )
        if world.placement.world_size == 1:
            return over_devices("ddp2", model, wrapping)
        self._divides = divides_batches("ddp2", wrapping.device)
        return super().prepare_model(model, world, wrapping)

    def wrapper(self, comm: Algorithm | None) -> type[DistributedModel]:
        kind = super().wrapper(comm)
        return _OVER_DEVICES[kind] if self._divides else kind

    def devices(self, wrapping: Wrapping) -> dict[str, Any]:
        return {} if self._divides else super().devices(wrapping)


class _OverDevices(DDPSteps):
    """DDP model whose forward runs on all devices of this process; DDP sees the gradients on the first."""

    def run_module(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model on all devices of this process."""
        devices = list(range(visible_devices().count))
        return data_parallel(self.module, inputs, devices, module_kwargs=kwargs or None)


class _ModelOverDevices(DistributedModel):
    """Wrapped model whose forward runs on all devices of this process."""

    class _distwrap_ddp(_OverDevices, AveragingModel):
        """torch's wrapper inside."""


class _ReplicaOverDevices(ReplicaModel):
    """Replica whose forward runs on all devices of this process."""

    class _distwrap_ddp(_OverDevices, AveragingReplica):
        """torch's wrapper inside."""


_OVER_DEVICES: dict[type[DistributedModel], type[DistributedModel]] = {
    DistributedModel: _ModelOverDevices, ReplicaModel: _ReplicaOverDevices
}  # fmt: skip
