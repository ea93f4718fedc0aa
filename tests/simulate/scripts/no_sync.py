"""Gradients accumulated in no_sync, against the same batches in one step; a hook of DDP counts what was sent."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
sent = []


def hook(state, bucket):
    sent.append(bucket.buffer().numel())
    future = dist.all_reduce(bucket.buffer().div_(world_size), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def make():
    torch.manual_seed(2)
    model = DDP(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 1)).double(), gradient_as_bucket_view=True)
    model.register_comm_hook(None, hook)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-3)


def batches(epoch):
    generator = torch.Generator().manual_seed(100 * epoch + rank)
    x = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    return x, x.square().sum(1, keepdim=True)


totals = []
for parts in (1, 3):
    model, optimizer = make()
    for epoch in range(3):
        x, y = batches(epoch)
        optimizer.zero_grad()
        for number, (xs, ys) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=False)):
            context = model.no_sync() if number < parts - 1 else contextlib.nullcontext()
            with context:
                (nn.functional.mse_loss(model(xs), ys) / parts).backward()
        optimizer.step()
    totals.append(sum(p.abs().sum().item() for p in model.parameters()))
norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
if rank == 0:
    print("RESULT weights", *(f"{total:.8f}" for total in totals))
    print(f"RESULT norm {norm.item():.8f} sent {sum(sent)} in {len(sent)}")
dist.destroy_process_group()
