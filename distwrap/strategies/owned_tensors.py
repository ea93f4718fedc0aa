"""Tensors that one rank has as a whole, and the others not at all, as pieces of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from distwrap.group.world import RunPart, World, current_world

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def on_owner(local: torch.Tensor, shape: tuple[int, ...], owner: int) -> DTensor:
    """Return a ``DTensor`` that is whole on its owner; every rank calls it in the same order.

    Args:
        local: the whole tensor on its owner, and an empty one of its type and device on other ranks.
        shape: the shape of the tensor.
        owner: the rank that has it.
    """
    from torch.distributed.tensor import DTensor, Replicate

    mesh = current_world().part(OwnerMeshes).of(owner, local.device.type)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Replicate()], run_check=False, shape=torch.Size(shape), stride=stride)


class OwnerMeshes(RunPart):
    """Meshes of one rank each, made once a run, for tensors that only one rank has."""

    def __init__(self, world: World) -> None:
        self._size = world.placement.world_size
        self._meshes: dict[str, list[DeviceMesh]] = {}

    def of(self, owner: int, device: str) -> DeviceMesh:
        """Return the mesh of an owner; every rank calls it in the same order."""
        from torch.distributed.device_mesh import DeviceMesh

        if device not in self._meshes:
            self._meshes[device] = [DeviceMesh(device, [rank]) for rank in range(self._size)]
        return self._meshes[device][owner]
