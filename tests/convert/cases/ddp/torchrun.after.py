import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from distwrap import (
    barrier,
    device as distwrap_device,
    distributed,
    local_rank as distwrap_local_rank,
    rank as distwrap_rank,
    save,
    shard_loader,
    wrap_model,
)


@distributed
def main():
    rank = distwrap_rank()
    local_rank = distwrap_local_rank()
    device = distwrap_device()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    x = torch.randn(32, 3)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    loader = shard_loader(DataLoader(dataset, batch_size=int(os.environ["BATCH"]), shuffle=True))
    model = nn.Linear(3, 1).to(device)
    model = wrap_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for inputs, targets in loader:
            inputs, targets = inputs.to(device), targets.to(device)
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    if rank == 0:
        save(model.state_dict(), os.environ["OUT"], alone=True)
    barrier()


if __name__ == "__main__":
    main()
