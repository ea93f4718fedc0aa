"""Lightning's former strategy ``ddp2``: a process for each node, which uses all its devices.

In each process torch's DataParallel splits the batch over threads, in full precision. Between the nodes it is DDP, with
any algorithm of exchange. On the CPU, or with one device a node, it is DDP with one process a node.
"""

from typing import Any

from torch import nn
from torch.nn.parallel import data_parallel

from distwrap.comm.base import Algorithm
from distwrap.devices.selection import visible_devices
from distwrap.errors import OptionError
from distwrap.group.world import World
from distwrap.model.distributed import AveragingModel, DistributedModel
from distwrap.strategies.base import Wrapping
from distwrap.strategies.ddp import DDPStrategy
from distwrap.strategies.dp import check_over_devices


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
        if visible_devices().count > 1:
            check_over_devices("ddp2")
        return super().prepare_model(model, world, wrapping)

    def wrapper(self, comm: Algorithm | None) -> type[DistributedModel]:
        return super().wrapper(comm) if visible_devices().count < 2 else _ModelOverDevices

    def devices(self, wrapping: Wrapping) -> dict[str, Any]:
        return super().devices(wrapping) if visible_devices().count < 2 else {}


class _OverDevices(AveragingModel):
    """DDP model whose forward runs on all devices of this process; DDP sees the gradients on the first."""

    def run_module(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model on all devices of this process."""
        devices = list(range(visible_devices().count))
        return data_parallel(self.module, inputs, devices, module_kwargs=kwargs or None)


class _ModelOverDevices(DistributedModel):
    """Wrapped model whose forward runs on all devices of this process."""

    _distwrap_ddp = _OverDevices
