"""A user's script: the same under horovodrun, mpirun and distwrap's own launchers."""

from __future__ import annotations

import json
import os

import torch
from torch import nn

import distwrap as dw
from distwrap import distributed

ROWS = 12


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


def main() -> torch.Tensor:
    """Train, and return the weights in one row."""
    model = dw.wrap_model(net())
    trained(model, torch.optim.Adam(model.parameters(), lr=0.05))
    return nn.utils.parameters_to_vector(model.parameters()).detach()


if __name__ == "__main__":
    weights = distributed(strategy="horovod", timeout=60)(main)()
    os.write(1, f"TOLD {json.dumps(weights.tolist())}\n".encode())
