"""Survive failures: ranks that fail are started again, and continue from the last checkpoint.

    python examples/elastic.py                     two ranks; one of them dies in epoch 3, and is started again
    python examples/elastic.py --no-accident       the same without the accident

On several nodes, which may come and go, start this on each of them (`node1` being one of them):

    DISTWRAP_NNODES=1:4 DISTWRAP_RDZV_ENDPOINT=node1:29400 python examples/elastic.py

The pattern has three parts: `max_restarts`, `save` after each epoch, and `resume_from` before the first epoch.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from digits import Net, evaluate, load_data
from torch.utils.data import DataLoader

from distwrap import distributed, rank, resume_from, save, shard_loader, wrap_model


@distributed(nprocs=2, max_restarts=3, seed=0)
def main(epochs: int, path: Path, accident: bool) -> float:
    train_set, test_set = load_data()
    model = wrap_model(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train_loader = shard_loader(DataLoader(train_set, batch_size=32, shuffle=True), batch_size="global")
    test_loader = shard_loader(DataLoader(test_set, batch_size=100))

    first, state = 0, resume_from(path)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
        if rank() == 0:
            print(f"goes on with epoch {first}")

    for epoch in range(first, epochs):
        if accident and epoch == 3 and first == 0 and rank() == 1:
            os.kill(os.getpid(), 9)
        train_loader.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        save({"model": model, "optimizer": optimizer, "epoch": epoch}, path)
    return evaluate(model, test_loader)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on handwritten digits, and survive an accident.")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("digits_elastic.pt"))
    parser.add_argument("--no-accident", action="store_true")
    args = parser.parse_args()
    args.out.unlink(missing_ok=True)
    accuracy = main(args.epochs, args.out.resolve(), not args.no_accident)
    print(f"test accuracy {accuracy:.4f}, model saved in {args.out.resolve()}")
