import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from distwrap import (
    device as distwrap_device,
    distributed,
    rank_zero_only,
    save,
    shard_loader,
    wrap_model,
)

print = rank_zero_only(print)


@distributed
def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    device = distwrap_device()
    loader = shard_loader(DataLoader(TensorDataset(torch.randn(32, 3)), batch_size=int(os.environ["BATCH"])), batch_size="global")
    model = nn.Linear(3, 1)
    model = wrap_model(model)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for (x,) in loader:
            x = x.to(device)
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
    save(model.state_dict(), os.environ["OUT"])


if __name__ == "__main__":
    main()
