"""Train a small network by DistributedDataParallel, on processes of mp.spawn."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data():
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


def make_model():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", rank=rank, world_size=world_size)


def train(rank, world_size, path):
    setup(rank, world_size)
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if use_cuda else torch.device("cpu")

    torch.manual_seed(0)
    model = DDP(make_model().to(device), device_ids=[rank] if use_cuda else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dataset = make_data()
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

    if rank == 0:
        torch.save(model.module.state_dict(), path)
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = 2
    mp.spawn(train, args=(world_size, sys.argv[1]), nprocs=world_size)
