"""A small training that engines are compared by: the same data and weights in each process, a loop in plain torch."""

from __future__ import annotations

import torch
from torch import nn

import distwrap as dw

ROWS = 12  # which 2, 3 and 4 ranks divide evenly


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the whole batch of each step."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(ROWS, 5, generator=generator), torch.randn(ROWS, 3, generator=generator)


def net() -> nn.Module:
    """Make the net whose weights are a seed's."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train a model by this rank's rows of a few batches."""
    x, y = data()
    mine = slice(dw.rank(), None, dw.world_size())
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
        optimizer.step()
