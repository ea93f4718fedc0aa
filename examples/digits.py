"""Train a small network on scikit-learn's handwritten digits: the same loop, plain and distributed.

    python examples/digits_plain.py     one process, plain PyTorch
    python examples/digits.py           two processes, with distwrap

What distwrap asks for is what `diff examples/digits_plain.py examples/digits.py` prints.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from distwrap import distributed, gather, save, shard_loader, wrap_model


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )


def load_data():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    data = TensorDataset(images, torch.tensor(labels))
    return random_split(data, [1437, 360], torch.Generator().manual_seed(0))


def train(model, optimizer, loader, epochs: int) -> None:
    model.train()
    for _ in range(epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@torch.no_grad()
def evaluate(model, loader) -> float:
    model.eval()
    hits = torch.cat([model(x).argmax(1) == y for x, y in loader])
    return gather(hits).float().mean().item()


@distributed(nprocs=2)
def main(epochs: int, out: Path) -> float:
    torch.manual_seed(0)
    train_set, test_set = load_data()
    model = wrap_model(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train_loader = shard_loader(DataLoader(train_set, batch_size=32, shuffle=True), batch_size="global")
    test_loader = shard_loader(DataLoader(test_set, batch_size=100))
    train(model, optimizer, train_loader, epochs)
    save(model, out)
    return evaluate(model, test_loader)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("digits.pt"))
    args = parser.parse_args()
    accuracy = main.options(nprocs=args.nprocs)(args.epochs, args.out)
    print(f"test accuracy {accuracy:.4f}, model saved in {args.out.resolve()}")
