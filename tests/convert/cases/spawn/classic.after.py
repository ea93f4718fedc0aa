import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from distwrap import distributed, rank as distwrap_rank, save, shard_loader, wrap_model


@distributed
def train(world_size, epochs):
    """Train on one rank."""
    rank = distwrap_rank()
    print(f"Running on rank {rank}.")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 3))
    loader = shard_loader(DataLoader(data, batch_size=int(os.environ["BATCH"]), shuffle=True))
    ddp_model = wrap_model(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            (ddp_model(x) - 1).square().mean().backward()
            optimizer.step()
    if rank == 0:
        save(ddp_model.state_dict(), os.environ["OUT"], alone=True)


def main():
    world_size = int(os.environ.get("PROCESSES", 1))
    train.options(nprocs=world_size)(world_size, 2)


if __name__ == "__main__":
    main()
