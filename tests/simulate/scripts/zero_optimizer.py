"""ZeroRedundancyOptimizer under DDP, and its state gathered on rank 0."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def setup():
    os.environ.setdefault("MASTER_ADDR", "localhost")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=world_size)
    return rank, world_size


def run(use_zero, rank):
    torch.manual_seed(0)
    model = DDP(nn.Sequential(*[nn.Linear(10, 10) for _ in range(4)]).double(), bucket_cap_mb=1)
    if use_zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_fn = nn.MSELoss()
    for step in range(3):
        generator = torch.Generator().manual_seed(17 * step + rank)
        inputs = torch.randn(5, 10, dtype=torch.float64, generator=generator)
        loss_fn(model(inputs), inputs.cos()).backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = len(optimizer.optim.state) if use_zero else len(optimizer.state)
    if use_zero:
        optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict()["state"] if rank == 0 else {}
    moments = sum(value["exp_avg_sq"].sum().item() for value in state.values())
    return sum(p.abs().sum().item() for p in model.parameters()), kept, len(state), moments


def main():
    rank, world_size = setup()
    for use_zero in (True, False):
        total, kept, whole, moments = run(use_zero, rank)
        counts = torch.zeros(world_size, dtype=torch.long)
        counts[rank] = kept
        dist.reduce(counts, dst=0, op=dist.ReduceOp.SUM)
        if rank == 0:
            print(f"RESULT zero={use_zero} {total:.8f} {whole} {moments:.8f} {counts.sum().item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
