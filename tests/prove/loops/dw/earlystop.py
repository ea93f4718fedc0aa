import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distwrap import agree, distributed, reduce, shard_loader, wrap_model

PATIENCE = 3


def split_data():
    g = torch.Generator().manual_seed(29)
    x = torch.randn(170, 6, generator=g)
    y = x[:, :1] - 0.5 * x[:, 1:2] + 0.3 * torch.randn(170, 1, generator=g)
    return TensorDataset(x[:120], y[:120]), TensorDataset(x[120:], y[120:])


def validate(model, loader) -> float:
    model.eval()
    total, n = 0.0, 0
    with torch.inference_mode():
        for x, y in loader:
            total += nn.functional.mse_loss(model(x), y, reduction="sum").item()
            n += len(x)
    total, n = reduce([total, float(n)], "sum")
    return total / n


@distributed(seed=0)
def main():
    train_set, valid_set = split_data()
    train = shard_loader(DataLoader(train_set, batch_size=8), batch_size="global")
    valid = shard_loader(DataLoader(valid_set, batch_size=32))
    model = wrap_model(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    best, bad, step = math.inf, 0, 0
    for epoch in range(2):
        for x, y in train:
            model.train()
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 5 == 0:
                current = validate(model, valid)
                bad = 0 if current < best else bad + 1
                best = min(best, current)
        if agree(bad >= PATIENCE):
            break
    return step, best


if __name__ == "__main__":
    steps, best = main()
    print(f"stopped after {steps} steps, best {best:.6f}")
