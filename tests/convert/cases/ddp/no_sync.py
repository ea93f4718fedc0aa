import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 3))
    loader = DataLoader(data, batch_size=int(os.environ["BATCH"]), sampler=DistributedSampler(data, shuffle=False))
    model = DDP(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for i, (x,) in enumerate(loader):
            last = i % 2 == 1
            with nullcontext() if last or dist.get_world_size() == 1 else model.no_sync():
                loss = (model(x) - 1).square().mean() / 2
                loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), os.environ["OUT"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
