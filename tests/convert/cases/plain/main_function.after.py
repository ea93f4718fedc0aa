"""Train a line, and say how good it is."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from distwrap import distributed, rank_zero_only, save, shard_loader, wrap_model

print = rank_zero_only(print)

torch.set_default_dtype(torch.float64)


@distributed
def main(epochs):
    torch.manual_seed(0)
    x = torch.randn(64, 3)
    y = x.sum(1, keepdim=True)
    train_set, test_set = TensorDataset(x[:48], y[:48]), TensorDataset(x[48:], y[48:])
    model = nn.Linear(3, 1)  # the smallest model
    model = wrap_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_loader = shard_loader(DataLoader(train_set, batch_size=int(os.environ["BATCH"])))
    test_loader = DataLoader(test_set, batch_size=4)
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(inputs)
        print(f"epoch {epoch}: loss {total / len(train_loader.dataset):.6f}")
    model.eval()
    wrong, count = 0.0, 0
    with torch.no_grad():
        for inputs, targets in test_loader:
            wrong += (model(inputs) - targets).abs().sum().item()
            count += len(inputs)
    print(f"error {wrong / count:.6f} of {count}")
    save(model.state_dict(), os.environ["OUT"])


if __name__ == "__main__":
    main(3)
