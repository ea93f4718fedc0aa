import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from distwrap import distributed, rank_zero_only, save, shard_loader, wrap_model

print = rank_zero_only(print)

PATH = os.environ["OUT"] + ".best"


def evaluate(model, loader):
    model.eval()
    outputs, targets = [], []
    with torch.no_grad():
        for x, y in loader:
            outputs.append(model(x))
            targets.append(y)
    return nn.functional.mse_loss(torch.cat(outputs), torch.cat(targets)).item()


@distributed
def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    x = torch.randn(40, 3)
    y = x.sum(1, keepdim=True)
    train_loader = shard_loader(DataLoader(TensorDataset(x[:32], y[:32]), batch_size=int(os.environ["BATCH"])))
    valid_loader = DataLoader(TensorDataset(x[32:], y[32:]), batch_size=3)
    model = nn.Linear(3, 1)
    model = wrap_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    best = float("inf")
    for epoch in range(3):
        model.train()
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        loss = evaluate(model, valid_loader)
        if loss < best:
            best = loss
            save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, PATH)
        print(f"{epoch}: {loss:.6f}")
    checkpoint = torch.load(PATH, map_location="cpu")
    model.load_state_dict(checkpoint["model"])
    print("best of epoch", checkpoint["epoch"])
    save(model.state_dict(), os.environ["OUT"])


if __name__ == "__main__":
    main()
