import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from distwrap import (
    barrier,
    local_rank as distwrap_local_rank,
    rank as distwrap_rank,
    save,
    setup_process_group,
    shard_loader,
    wrap_model,
)


def setup():
    setup_process_group()


def main():
    setup()
    rank = distwrap_rank()
    local_rank = distwrap_local_rank()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    x = torch.randn(32, 3)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    loader = shard_loader(DataLoader(dataset, batch_size=int(os.environ["BATCH"]), shuffle=True))
    model = nn.Linear(3, 1).to(device)
    model = wrap_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        loader.set_epoch(epoch)
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
