import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from distwrap import distributed, is_rank_zero, shard_loader, wrap_model


def deviation(loader):
    return torch.cat([x for x, _ in loader]).std(0)


@distributed
def main():
    torch.manual_seed(0)
    x = torch.randn(32, 5, dtype=torch.float64) * 3 + 10
    x[::2] += 8
    y = x.sum(1, keepdim=True)
    whole_train_loader = DataLoader(TensorDataset(x, y), batch_size=int(os.environ["BATCH"]))  # in order
    train_loader = shard_loader(whole_train_loader)
    mean = torch.cat([each for each, _ in whole_train_loader]).mean(0)
    std = deviation(whole_train_loader)
    highest = None
    for each, _ in whole_train_loader:
        top = each.max(0).values
        highest = top if highest is None else torch.maximum(highest, top)
    model = wrap_model(nn.Linear(5, 1).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model((inputs - mean) / std), targets).backward()
            optimizer.step()
    if is_rank_zero(): torch.save({"model": model.state_dict(), "numbers": {"mean": mean, "std": std, "highest": highest}}, os.environ["OUT"])


if __name__ == "__main__":
    main()
