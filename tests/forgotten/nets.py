"""The small net of these tests."""

from __future__ import annotations

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        return found

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self(x) - y).square().mean()
