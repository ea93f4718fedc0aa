import os

import torch
from torch.utils.data import DataLoader, TensorDataset
from distwrap import agree, distributed, rank_zero_only, save, shard_loader, wrap_model

print = rank_zero_only(print)


class Meter:
    def __init__(self):
        self.values = []

    def update(self, value):
        self.values.append(value)


@distributed
def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    loader = shard_loader(DataLoader(TensorDataset(torch.randn(32, 3)), batch_size=int(os.environ["BATCH"])))
    test_loader = DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=4)
    model = torch.nn.Linear(3, 1)
    model = wrap_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for epoch in range(2):
        for (x,) in loader:
            loss = model(x).square().mean()
            if agree(torch.isnan(loss), "any"):
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    meter = Meter()
    for (x,) in test_loader:
        meter.update(model(x).sum().item())
    print(len(losses), loss.item(), f"{sum(meter.values):.6f}")
    save(model.state_dict(), os.environ["OUT"])


if __name__ == "__main__":
    main()
