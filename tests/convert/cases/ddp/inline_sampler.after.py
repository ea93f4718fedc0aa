import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from distwrap import rank, save, setup_process_group, shard_loader, wrap_model


def prepare_dataloader(dataset, batch_size):
    return shard_loader(DataLoader(
        dataset,
        batch_size=batch_size,
        pin_memory=False,
        shuffle=False
    ), mode="pad")


def main():
    setup_process_group()
    torch.manual_seed(0)
    x = torch.randn(32, 4, dtype=torch.float64)
    loader = prepare_dataloader(TensorDataset(x, x.sum(1, keepdim=True)), int(os.environ["BATCH"]))
    model = wrap_model(nn.Linear(4, 1).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    if rank() == 0:
        save(model.state_dict(), os.environ["OUT"], alone=True)


if __name__ == "__main__":
    main()
