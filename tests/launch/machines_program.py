"""A caller on one of several machines, for test_nodes.py: what comes home, and what is left where."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from distwrap import distributed, placement, world_size
from tests.clusters.job import tell


@distributed(nprocs=2, returns="all")
def everybody(scale: int) -> tuple[int, torch.Tensor]:
    """Every rank's value."""
    print(f"printed by rank {placement().rank}")
    return placement().rank * scale, torch.full((2,), float(placement().rank))


@distributed(nprocs=1, retrofit=True, seed=0)
def fit(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Train the caller's own model."""
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(torch.ones(4, 2)) - 1).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss) + 0 * world_size()


if __name__ == "__main__":
    values = everybody(10)
    tell(all=[(rank, tensor.tolist()) for rank, tensor in values] if isinstance(values, list) else str(values))
    torch.manual_seed(0)
    mine = nn.Linear(2, 1)
    loss = fit(mine, torch.optim.SGD(mine.parameters(), lr=0.1))
    tell(
        weights=mine.weight.tolist(),
        formatted=f"{loss:.3f}",
        logs=sorted(path.name for path in Path(sys.argv[1]).iterdir()),
    )
