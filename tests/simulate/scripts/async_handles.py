"""Collectives that are begun together, and waited for in another order; functional ones too."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
f64 = torch.float64

a = torch.arange(5, dtype=f64) + rank
b = torch.full((3,), float(rank + 1), dtype=f64)
c = torch.full((2, 2), float(rank), dtype=f64)
d = [torch.empty(2, dtype=f64) for _ in range(size)]
e = torch.empty(2, dtype=f64)
works = [
    dist.all_reduce(a, async_op=True),
    dist.all_reduce(b, op=dist.ReduceOp.MAX, async_op=True),
    dist.broadcast(c, src=size - 1, async_op=True),
    dist.all_gather(d, torch.tensor([rank, rank**2], dtype=f64), async_op=True),
    dist.reduce_scatter_tensor(e, torch.arange(2 * size, dtype=f64) * (rank + 1), async_op=True),
]
meanwhile = sum(i * i for i in range(1000))
for index in (4, 1, 3, 0, 2) if rank % 2 == 0 else (0, 1, 2, 3, 4):
    works[index].wait()
works[2].wait()  # again

f = torch.ones(2, dtype=f64) * (rank + 1)
future = dist.all_reduce(f, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
doubled = future.wait()

g = funcol.all_reduce(torch.full((3,), float(rank), dtype=f64), "sum", dist.group.WORLD)
h = funcol.all_gather_tensor(torch.full((1, 2), float(rank), dtype=f64), 0, dist.group.WORLD)
both = [torch.full((2,), float(rank), dtype=f64), torch.full((1,), float(rank * 2), dtype=f64)]
handles = [dist.all_reduce(each, async_op=True) for each in both]
for handle in reversed(handles):
    handle.wait()
dist.monitored_barrier()
everyone = [None] * size
tensors = [a, b, c, *d, e, doubled, g + 0, h + 0, *both]
dist.all_gather_object(everyone, [round(float(each.sum()), 8) for each in tensors])
if rank == 0:
    print("RESULT meanwhile", meanwhile)
    for number, sums in enumerate(everyone):
        print("RESULT", number, *sums)
dist.destroy_process_group()
