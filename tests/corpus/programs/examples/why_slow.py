"""Find out why a run is slow: the report names two faults, each with the line that mends it.

The digits come from a storage that answers after a millisecond, as one in a network does. The loop reads them one
after the other, and rank 0 alone evaluates. The report says so, and what each fault costs:

    python examples/why_slow.py
    python examples/why_slow.py --workers 2                       # the loader reads ahead
    python examples/why_slow.py --workers 2 --share-evaluation    # and every rank evaluates its part
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split

from distwrap import distributed, gather, is_rank_zero, shard_loader, wrap_model


class Storage(Dataset):
    """Digits that come after a while."""

    def __init__(self, seconds: float) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        self.labels, self.seconds = torch.tensor(labels), seconds

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        time.sleep(self.seconds)
        return self.images[index], self.labels[index]


class Net(nn.Sequential):
    def __init__(self, channels: int = 96) -> None:
        super().__init__(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )


@torch.no_grad()
def hits(model: nn.Module, loader: DataLoader) -> torch.Tensor:
    return torch.cat([model(x).argmax(1) == y for x, y in loader])


@distributed(nprocs=2, report=True)
def main(epochs: int, test_samples: int, workers: int, share_evaluation: bool) -> float:
    torch.manual_seed(0)
    digits = Storage(seconds=0.001)
    sizes = [len(digits) - test_samples, test_samples]
    train_set, test_set = random_split(digits, sizes, torch.Generator().manual_seed(0))
    model = wrap_model(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ahead = {"num_workers": workers, "persistent_workers": workers > 0}
    train_loader = shard_loader(DataLoader(train_set, batch_size=32, shuffle=True, **ahead))
    test_loader = DataLoader(test_set, batch_size=60, **ahead)
    if share_evaluation:
        test_loader = shard_loader(test_loader)
    accuracy = 0.0
    for _ in range(epochs):
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if share_evaluation:
            accuracy = gather(hits(model, test_loader)).float().mean().item()
        elif is_rank_zero():
            accuracy = hits(model, test_loader).float().mean().item()
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on handwritten digits, slowly.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--test-samples", type=int, default=360)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--share-evaluation", action="store_true")
    args = parser.parse_args()
    began = time.perf_counter()
    accuracy = main(args.epochs, args.test_samples, args.workers, args.share_evaluation)
    print(f"test accuracy {accuracy:.4f}, {time.perf_counter() - began:.1f} s")
