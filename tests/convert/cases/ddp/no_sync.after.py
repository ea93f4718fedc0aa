import os
from contextlib import nullcontext

import torch
from torch.utils.data import DataLoader, TensorDataset
from distwrap import no_sync, rank, save, setup_process_group, shard_loader, world_size, wrap_model


def main():
    setup_process_group()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 3))
    loader = shard_loader(DataLoader(data, batch_size=int(os.environ["BATCH"])), mode="pad")
    model = wrap_model(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for i, (x,) in enumerate(loader):
            last = i % 2 == 1
            with nullcontext() if last or world_size() == 1 else no_sync(model):
                loss = (model(x) - 1).square().mean() / 2
                loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    if rank() == 0:
        save(model.state_dict(), os.environ["OUT"], alone=True)


if __name__ == "__main__":
    main()
