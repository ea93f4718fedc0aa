import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from distwrap import distributed, rank_zero_only, save, shard_loader, wrap_model

print = rank_zero_only(print)


def get_loaders(batch_size):
    x = torch.randn(40, 3)
    y = (x.sum(1) > 0).long()
    train_loader = shard_loader(DataLoader(TensorDataset(x[:32], y[:32]), batch_size=batch_size))
    val_loader = DataLoader(TensorDataset(x[32:], y[32:]), batch_size=batch_size)
    return train_loader, val_loader


def build_model():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


@torch.no_grad()
def validate(model, loader, criterion):
    model.eval()
    total_loss, correct, total = 0.0, 0, 0
    for x, y in loader:
        output = model(x)
        total_loss += criterion(output, y).item() * y.size(0)
        correct += (output.argmax(1) == y).sum().item()
        total += y.size(0)
    return total_loss / total, correct / total


@distributed
def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    train_loader, val_loader = get_loaders(int(os.environ["BATCH"]))
    model = build_model()
    criterion = nn.CrossEntropyLoss()
    model = wrap_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for epoch in range(3):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        loss, accuracy = validate(model, val_loader, criterion)
        scheduler.step(loss)
        print(f"{epoch}: {loss:.4f} {accuracy:.4f}")
    save(model.state_dict(), os.environ["OUT"])


if __name__ == "__main__":
    main()
