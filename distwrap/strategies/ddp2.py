"""Lightning's former strategy ``ddp2``: a process for each node, which uses all its devices.

In each process torch's DataParallel splits the batch over threads, in full precision. Between the nodes it is DDP, with
any algorithm of exchange; on one node it is DataParallel alone. On the CPU, or with one device a node, it is DDP with
one process a node.
"""

from typing import Any

from torch import nn
from torch.nn.parallel import data_parallel

from distwrap._internals.torch import DDPSteps
from distwrap.devices.selection import visible_devices
from distwrap.errors import OptionError
from distwrap.group.world import World
from distwrap.model.distributed import AveragingModel, AveragingReplica, DistributedModel, ReplicaModel
from distwrap.protocols import Algorithm
from distwrap.strategies.base import Wrapping
from distwrap.strategies.ddp import DDPStrategy
from distwrap.strategies.dp import divides_batches, over_devices


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
