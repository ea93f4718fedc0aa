import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from distwrap import distributed, is_rank_zero, shard_loader, wrap_model


def deviation(loader):
    # TODO(distwrap): this sees the rank's share of the loader alone: a second DataLoader for this, not sharded
    return torch.cat([x for x, _ in loader]).std(0)


@distributed
def main():
    torch.manual_seed(0)
    x = torch.randn(32, 5, dtype=torch.float64) * 3 + 10
    x[::2] += 8
    y = x.sum(1, keepdim=True)
    train_loader = shard_loader(DataLoader(TensorDataset(x, y), batch_size=int(os.environ["BATCH"])))  # in order
    # TODO(distwrap): this sees the rank's share of the loader alone: a second DataLoader for this, not sharded
    mean = torch.cat([each for each, _ in train_loader]).mean(0)
    std = deviation(train_loader)
    highest = None
    # TODO(distwrap): this sees the rank's share of the loader alone: a second DataLoader for this, not sharded
    for each, _ in train_loader:
        top = each.max(0).values
        highest = top if highest is None else torch.maximum(highest, top)
    model = nn.Linear(5, 1).double()
    model = wrap_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model((inputs - mean) / std), targets).backward()
            optimizer.step()
    if is_rank_zero(): torch.save({"model": model.state_dict(), "numbers": {"mean": mean, "std": std, "highest": highest}}, os.environ["OUT"])


if __name__ == "__main__":
    main()
