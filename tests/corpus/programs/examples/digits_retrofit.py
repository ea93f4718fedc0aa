"""Distribute a function that knows nothing of distwrap: `train` of digits_plain.py, without an edit.

With `retrofit=True` the model, the optimizer and the loader among the arguments are wrapped on each rank before the
function sees them, and the trained weights and optimizer state are written back into the caller's own objects.

    python examples/digits_retrofit.py --nprocs 2
"""

from __future__ import annotations

import argparse
from pathlib import Path

import digits_plain
import torch
from torch.utils.data import DataLoader

from distwrap import distributed, save

train = distributed(nprocs=2, retrofit=True)(digits_plain.train)


def main(epochs: int, nprocs: int, out: Path) -> float:
    torch.manual_seed(0)
    train_set, test_set = digits_plain.load_data()
    model = digits_plain.Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    before = digits_plain.evaluate(model, DataLoader(test_set, batch_size=100))
    train.options(nprocs=nprocs)(model, optimizer, DataLoader(train_set, batch_size=32, shuffle=True), epochs)
    after = digits_plain.evaluate(model, DataLoader(test_set, batch_size=100))
    save({"model": model, "optimizer": optimizer}, out)
    print(f"test accuracy {before:.4f} before, {after:.4f} after, model and optimizer saved in {out.resolve()}")
    return after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on handwritten digits, without touching the loop.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("digits_retrofit.pt"))
    args = parser.parse_args()
    main(args.epochs, args.nprocs, args.out)
