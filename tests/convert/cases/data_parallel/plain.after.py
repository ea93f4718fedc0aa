import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from distwrap import distributed, rank_zero_only, save, shard_loader, wrap_model

print = rank_zero_only(print)


@distributed
def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = shard_loader(DataLoader(TensorDataset(torch.randn(32, 3)), batch_size=int(os.environ["BATCH"])), batch_size="global")
    model = nn.Linear(3, 1)
    if torch.cuda.device_count() > 1:
        print("Let's use", torch.cuda.device_count(), "GPUs!")
    model.to(device)
    model = wrap_model(model)
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
