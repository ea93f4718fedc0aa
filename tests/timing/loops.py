"""Loops that are slow on purpose on a rank: a sleep is longer than anything that busy cores add."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw

STEPS, LONG = 12, 0.06


class Net(nn.Module):
    """A net whose forward takes a while on some ranks."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            time.sleep(self.seconds)
        return self.net(x)  # type: ignore[no-any-return]


def train(seconds: float = 0.0, each: Callable[[int, nn.Module], object] = lambda step, model: None) -> nn.Module:
    data = TensorDataset(torch.randn(2 * 4 * STEPS, 8, generator=torch.Generator().manual_seed(0)))
    model = dw.wrap_model(Net(seconds))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (x,) in enumerate(dw.shard_loader(DataLoader(data, batch_size=4))):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        each(step, model)
    return model


def slow_forward_on_one() -> None:
    train(LONG if dw.rank() == 0 else 0.0)
