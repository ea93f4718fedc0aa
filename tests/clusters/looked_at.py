"""A user's script that trains for a while, with a slow rank.

Usage: looked_at.py SECONDS
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader

import distwrap as dw


def train(steps: int, lag: float = 0.05) -> None:
    """Train; rank 0 takes some seconds more for each step."""
    model = dw.wrap_model(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(2 * dw.world_size() * steps, 4)
    for x in dw.shard_loader(DataLoader(data, batch_size=2)):  # type: ignore[arg-type]
        if dw.is_rank_zero():
            time.sleep(lag)
        model(x).square().mean().backward()
        optimizer.step()


@dw.distributed(timeout=60)
def main(seconds: float) -> None:
    """Train, and let others look."""
    train(int(20 * seconds))


if __name__ == "__main__":
    main(float(sys.argv[1]))
