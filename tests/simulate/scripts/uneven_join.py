"""Ranks with different numbers of batches, trained by DDP's join, and two models in one Join."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def data(rank):
    torch.manual_seed(300 + rank)
    return [torch.randn(2, 3, dtype=torch.float64) for _ in range(3 + 2 * rank)]


def main():
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(9)
    first = DDP(nn.Linear(3, 1).double())
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    seen = 0
    with first.join(divide_by_initial_world_size=True):
        for x in data(rank):
            optimizer.zero_grad()
            first(x).pow(2).mean().backward()
            optimizer.step()
            seen += 1

    second = DDP(nn.Linear(3, 2).double())
    divided = ZeroRedundancyOptimizer(second.parameters(), torch.optim.SGD, lr=0.05, momentum=0.5)
    with Join([second, divided]):
        for x in data(rank):
            second(x).abs().sum().backward()
            divided.step()
            divided.zero_grad()
            seen += 1
    counts = torch.tensor([float(seen), float(rank)])
    gathered = [torch.zeros(2) for _ in range(dist.get_world_size())] if rank == 0 else None
    dist.gather(counts, gathered, dst=0)
    weights = torch.cat([p.detach().reshape(-1) for p in (*first.parameters(), *second.parameters())])
    low, high = weights.clone(), weights.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    if rank == 0:
        print("RESULT seen", *(int(each[0]) for each in gathered))
        print("RESULT weights", *(f"{value:.8f}" for value in weights.tolist()))
        print(f"RESULT apart {(high - low).max().item():.8f}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
