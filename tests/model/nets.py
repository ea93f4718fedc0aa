"""A model with all that a wrapper must let through."""

from __future__ import annotations

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Linear(3, 4, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)
        self.gain = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.classes = ["cat", "dog"]
        self.dim, self.device = 7, "anywhere"  # DistributedDataParallel has attributes of these names too
        self._step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x)) * self.gain

    def describe(self) -> str:
        return f"{len(self.classes)} classes at step {self._step}"

    @property
    def width(self) -> int:
        return self.body.out_features

    @property
    def unset(self) -> int:
        raise AttributeError("not yet")
