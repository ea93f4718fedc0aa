"""Device meshes whose process groups have the time limit of the run."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distwrap._internals.torch_sharding import set_timeout
from distwrap.group.world import World


def mesh_over(world: World, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of all ranks; every rank calls it.

    torch would give the groups of a mesh a time limit of half an hour.

    Args:
        world: the world of the run.
        shape: the number of ranks in each dimension.
        names: the names of the dimensions.
    """
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
    for name in names:
        set_timeout(mesh.get_group(name), timedelta(seconds=world.options.timeout))
    return mesh
