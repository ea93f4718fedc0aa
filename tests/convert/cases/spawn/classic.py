import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29573"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


def train(rank, world_size, epochs):
    """Train on one rank."""
    print(f"Running on rank {rank}.")
    setup(rank, world_size)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 3))
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)
    loader = DataLoader(data, batch_size=int(os.environ["BATCH"]), sampler=sampler)
    ddp_model = DDP(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            (ddp_model(x) - 1).square().mean().backward()
            optimizer.step()
    if rank == 0:
        torch.save(ddp_model.module.state_dict(), os.environ["OUT"])
    cleanup()


def main():
    world_size = int(os.environ.get("PROCESSES", 1))
    mp.spawn(train, args=(world_size, 2), nprocs=world_size, join=True)


if __name__ == "__main__":
    main()
