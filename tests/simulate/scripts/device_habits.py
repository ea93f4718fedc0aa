"""What scripts ask of GPUs besides: properties, streams, generators, SyncBatchNorm, torch.compile; PLAIN=1 has none."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as DDP

PLAIN = os.environ.get("PLAIN") == "1"
dist.init_process_group("cpu:gloo,cuda:nccl" if not PLAIN else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
device = torch.device("cpu" if PLAIN else f"cuda:{rank}")


def batch(of):
    generator = torch.Generator(device=device).manual_seed(of)
    return torch.randn(4 + of, 3, 5, device=device, generator=generator, dtype=torch.float64)


def copied(x):
    if PLAIN:
        return x.clone()
    assert torch.cuda.get_device_properties(device).total_memory
    assert torch.cuda.get_device_capability()[0] >= 8
    free, total = torch.cuda.mem_get_info()
    assert free <= total
    assert torch.cuda.device_count() == size
    assert torch.cuda.current_device() == rank
    states = torch.cuda.get_rng_state()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.random.fork_rng(devices=[rank]):
        y = x.to(device, non_blocking=True)
    y.record_stream(stream)
    torch.cuda.set_rng_state(states)
    torch.cuda.nvtx.range_push("train")
    torch.cuda.nvtx.range_pop()
    return y


torch.manual_seed(0)
mesh = DeviceMesh(device.type, list(range(size)))
norm = nn.Sequential(nn.Conv1d(3, 2, 1), nn.BatchNorm1d(2), nn.Flatten()).double().to(device)
head = DDP(nn.Sequential(nn.Linear(10, 4), nn.ReLU(), nn.Linear(4, 1)).double().to(device))
head = torch.compile(head, backend="eager")
if PLAIN:  # torch's SyncBatchNorm is for GPUs: here each rank computes all ranks' batches
    features = norm(torch.cat([batch(of) for of in range(size)]))
    loss = head(features).square().sum()
else:
    norm = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(norm), device_ids=[rank])
    features = norm(copied(batch(rank)))
    loss = head(features).square().sum() * size
loss.backward()
grads = [p.grad.abs().sum().item() for p in (*norm.parameters(), *head.parameters())]
statistics = [value.double().sum().item() for value in norm.buffers()]
norm.eval()
total = norm(batch(0)).sum().item()
if rank == 0:
    print("RESULT mesh", mesh.size(), mesh.get_local_rank())
    print("RESULT gradients", *(f"{value:.6f}" for value in grads))
    print("RESULT statistics", *(f"{value:.6f}" for value in statistics), f"{total:.6f}")
dist.destroy_process_group()
