"""README's shape: @distributed, shard_loader, gather, save."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distwrap import device, distributed, gather, is_rank_zero, save, shard_loader, wrap_model


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 10))


def load_data():
    images = torch.randn(96, 1, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = images.flatten(1)[:, :10].argmax(1)
    return TensorDataset(images[:64], labels[:64]), TensorDataset(images[64:], labels[64:])


def train(model, optimizer, loader, epochs):
    model.train()
    for _ in range(epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    hits = torch.cat([model(x).argmax(1) == y for x, y in loader])
    return gather(hits).double().mean().item()


@distributed(nprocs=2)
def main(epochs, out):
    torch.manual_seed(0)
    train_set, test_set = load_data()
    model = wrap_model(Net().double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_loader = shard_loader(DataLoader(train_set, batch_size=8, shuffle=True))
    test_loader = shard_loader(DataLoader(test_set, batch_size=10))
    train(model, optimizer, train_loader, epochs)
    save(model, out)
    if is_rank_zero():
        assert next(model.parameters()).device == device()
    return evaluate(model, test_loader)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("digits.pt"))
    args = parser.parse_args()
    accuracy = main(args.epochs, args.out)
    if is_rank_zero():
        state = torch.load(args.out, weights_only=True)
        total = sum(value.abs().sum().item() for value in state.values())
        print(f"RESULT accuracy {accuracy:.6f} weights {total:.8f}", *sorted(state))
