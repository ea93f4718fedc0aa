import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    world_size = int(os.environ["WORLD_SIZE"])
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    x = torch.randn(32, 3)
    dist.broadcast(x, src=0)
    loader = DataLoader(TensorDataset(x), batch_size=int(os.environ["BATCH"]), sampler=DistributedSampler(x, shuffle=False))
    net = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(2):
        for batch in loader:
            optimizer.zero_grad()
            loss = net(batch[0]).square().mean()
            loss.backward()
            optimizer.step()
            largest = loss.detach().clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX)
    gathered = [torch.zeros_like(largest) for _ in range(world_size)]
    if world_size > 1:
        dist.all_gather(gathered, largest)
    if dist.get_rank() == 0:
        torch.save(net.module.state_dict(), os.environ["OUT"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
