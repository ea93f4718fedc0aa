import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from distwrap import (
    broadcast,
    rank,
    reduce,
    save,
    setup_process_group,
    shard_loader,
    world_size as distwrap_world_size,
    wrap_model,
)


def main():
    setup_process_group()
    world_size = distwrap_world_size()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    x = torch.randn(32, 3)
    x = broadcast(x, 0)
    loader = shard_loader(DataLoader(TensorDataset(x), batch_size=int(os.environ["BATCH"])), mode="pad")
    net = wrap_model(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(2):
        for batch in loader:
            optimizer.zero_grad()
            loss = net(batch[0]).square().mean()
            loss.backward()
            optimizer.step()
            largest = loss.detach().clone()
            largest = reduce(largest, op="max")
    gathered = [torch.zeros_like(largest) for _ in range(world_size)]
    if world_size > 1:
        dist.all_gather(gathered, largest)
    if rank() == 0:
        save(net.state_dict(), os.environ["OUT"], alone=True)


if __name__ == "__main__":
    main()
