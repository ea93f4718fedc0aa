import os

import torch
from torch.utils.data import DataLoader, TensorDataset
from distwrap import device, distributed, rank as distwrap_rank, save, shard_loader, wrap_model


class Setting:
    port = "29575"


def ddp_setup(rank: int, world_size: int):
    """
    Args:
        rank: Unique identifier of each process
    """


@distributed
def main(world_size: int, total_epochs: int, batch_size: int):
    rank = distwrap_rank()
    ddp_setup(rank, world_size)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 3))
    loader = shard_loader(DataLoader(data, batch_size=batch_size), mode="pad")
    model = torch.nn.Linear(3, 1)
    if torch.cuda.is_available():
        model = model.to(device())
    model = wrap_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(total_epochs):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    if rank == 0:
        save(model.state_dict(), os.environ["OUT"], alone=True)


if __name__ == "__main__":
    world_size = int(os.environ.get("PROCESSES", "1"))
    main.options(nprocs=world_size)(world_size, 2, int(os.environ["BATCH"]))
