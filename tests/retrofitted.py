"""A training function that knows nothing of distribution; imported by tests, and run as a script by outer launchers."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw

SAMPLES, GLOBAL_BATCH = 32, 8


def train(model: nn.Module, optimizer: Optimizer, loader: DataLoader[Any], scheduler: LRScheduler) -> float:
    """Train two epochs, and return the last loss."""
    warnings.simplefilter("error")  # pytest's filters do not reach the ranks
    model.train()
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        scheduler.step()
    model.eval()
    return loss.item()


def objects(batch_size: int) -> tuple[nn.Module, Optimizer, DataLoader[Any], LRScheduler]:
    """Make what `train` takes, alike every time."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    x = torch.randn(SAMPLES, 4, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), batch_size=batch_size)
    return model, optimizer, loader, StepLR(optimizer, 1, 0.5)


def state(model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler) -> dict[str, Any]:
    """Return all that training has changed."""
    return {
        "weights": dict(model.state_dict()),
        "training": [module.training for module in model.modules()],
        "optimizer": optimizer.state_dict(),
        "scheduler": {name: value for name, value in scheduler.state_dict().items() if not name.startswith("_is")},
    }


def run(launcher: str, nprocs: int, calls: int) -> dict[str, Any]:
    """Train the same objects in so many calls, and return their state."""
    world_size = 2 if launcher == "external" else nprocs
    model, optimizer, loader, scheduler = objects(GLOBAL_BATCH // world_size)
    fit = dw.distributed(nprocs=nprocs, launcher=launcher, retrofit=True, timeout=30)(train)
    for _ in range(calls):
        fit(model, optimizer, loader, scheduler=scheduler)
    return state(model, optimizer, scheduler)


if __name__ == "__main__":
    launcher, path = sys.argv[1:]
    result = run(launcher, nprocs=2, calls=2)
    if dw.is_rank_zero():
        torch.save(result, path)
