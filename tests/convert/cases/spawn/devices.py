import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


class Setting:
    port = "29575"


def ddp_setup(rank: int, world_size: int):
    """
    Args:
        rank: Unique identifier of each process
    """
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = Setting.port
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    dist.init_process_group(backend="gloo", rank=rank, world_size=world_size)


def main(rank: int, world_size: int, total_epochs: int, batch_size: int):
    ddp_setup(rank, world_size)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 3))
    loader = DataLoader(data, batch_size=batch_size, sampler=DistributedSampler(data, shuffle=False))
    model = torch.nn.Linear(3, 1)
    if torch.cuda.is_available():
        model = model.to(rank)
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(total_epochs):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), os.environ["OUT"])
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = int(os.environ.get("PROCESSES", "1"))
    mp.spawn(main, (world_size, 2, int(os.environ["BATCH"])), world_size)
