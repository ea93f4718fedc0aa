import os

import torch
from torch.utils.data import DataLoader, TensorDataset
from distwrap import distributed, rank, reduce, save, shard_loader, wrap_model


def average(value, name):
    return reduce(torch.tensor(value)).item()


@distributed
def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 2))
    loader = shard_loader(DataLoader(data, batch_size=int(os.environ["BATCH"])), mode="pad")
    model = wrap_model(torch.nn.Linear(2, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(2):
        for (x,) in loader:
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
        mean_loss = average(loss.item(), "loss")
        if rank() == 0:
            print(f"{epoch}: {mean_loss:.4f}")
    if rank() == 0:
        save(model.state_dict(), os.environ["OUT"])


if __name__ == "__main__":
    main()
