"""Groups of some ranks: new_group, new_subgroups_by_enumeration, split of a mesh in two dimensions."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
lines = []


def value():
    return torch.tensor([float(rank + 1), float((rank + 1) ** 2)], dtype=torch.float64)


evens = dist.new_group(list(range(0, world_size, 2)))
odds = dist.new_group(list(range(1, world_size, 2))) if world_size > 1 else None
group = evens if rank % 2 == 0 else odds
x = value()
dist.all_reduce(x, group=group)
lines.append(("parity", dist.get_rank(group), dist.get_world_size(group), *x.tolist()))

halves = [list(range(world_size // 2)), list(range(world_size // 2, world_size))]
own, _ = dist.new_subgroups_by_enumeration([half for half in halves if half])
x = value()
source = min(dist.get_process_group_ranks(own))
dist.broadcast(x, src=source, group=own)
lines.append(("half", source, *x.tolist()))

rows = 2 if world_size % 2 == 0 else 1
mesh = init_device_mesh("cpu", (rows, world_size // rows), mesh_dim_names=("replicate", "shard"))
for name in ("replicate", "shard"):
    x = value()
    dist.all_reduce(x, op=dist.ReduceOp.PRODUCT, group=mesh.get_group(name))
    lines.append((name, mesh.get_local_rank(name), *x.tolist()))
pieces = [torch.empty(2, dtype=torch.float64) for _ in range(mesh["shard"].size())]
dist.all_gather(pieces, value(), group=mesh["shard"].get_group())
lines.append(("pieces", torch.stack(pieces).sum().item()))
flat = mesh["replicate", "shard"]._flatten("all")
x = value()
dist.all_reduce(x, group=flat.get_group())
lines.append(("flat", flat.size(), *x.tolist()))

outside = dist.new_group([0])
if rank == 0:
    x = value()
    dist.all_reduce(x, group=outside)
    lines.append(("alone", *x.tolist()))
assert (outside == dist.GroupMember.NON_GROUP_MEMBER) == (rank != 0)
everyone = [None] * world_size
dist.all_gather_object(everyone, lines)
if rank == 0:
    for number, each in enumerate(everyone):
        print("RESULT", number, *each)
dist.destroy_process_group()
