import os

import torch
from torch.utils.data import DataLoader, TensorDataset
from distwrap import distributed, is_rank_zero, shard_loader, wrap_model


def predict(model, loader):
    with torch.no_grad():
        return torch.cat([model(x) for (x,) in loader])


@distributed
def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    data = torch.randn(32, 3)
    train_loader = shard_loader(DataLoader(TensorDataset(data), batch_size=int(os.environ["BATCH"])))
    other_loader = DataLoader(TensorDataset(data[:7]), batch_size=2)
    model = torch.nn.Linear(3, 1)
    model = wrap_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for (x,) in train_loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    found = predict(model, other_loader)
    assert len(found) == 7
    if is_rank_zero(): torch.save({**model.state_dict(), "found": found}, os.environ["OUT"])


if __name__ == "__main__":
    main()
