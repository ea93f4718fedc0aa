"""Nets and data of the conformance suite, and the type in which they compute.

The nets are blocks that any strategy can divide, in widths that 2, 3 and 4 ranks divide.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

INPUTS, WIDTH, OUTPUTS, BLOCKS = 6, 12, 3, 4
ROWS = 8  # of a share's batch
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}

R = TypeVar("R")

_dtype = torch.float64


def computing_in(dtype: torch.dtype, fn: Callable[..., R], *args: object) -> R:
    """Call a function in which nets and data are of another type."""
    global _dtype
    before, _dtype = _dtype, dtype
    try:
        return fn(*args)
    finally:
        _dtype = before


def tolerance() -> float:
    """Return by how much numbers in that type may differ from one process's."""
    return TOLERANCES[_dtype]


class SmallBlock(nn.Module):
    """Feed-forward part of a transformer's layer, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.linear2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input and what the block adds to it."""
        hidden: torch.Tensor = self.linear1(self.norm(x))
        found: torch.Tensor = x + self.linear2(hidden.tanh())
        return found


class SmallNet(nn.Module):
    """A few blocks between two linear layers, which run one after the other.

    Attributes:
        scale: of the loss; what a user's model has beside its parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(SmallBlock() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, OUTPUTS)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(x)
        return found

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean squared error, as the loops train it."""
        return self.scale * nn.functional.mse_loss(self(x), y)

    def loss_sum(self, x: torch.Tensor, y: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Return the sum of the squared errors of the rows that count, for `scale_loss`."""
        errors: torch.Tensor = (self(x) - y).square().mean(1, keepdim=True)
        return (errors * keep).sum()


def small(
    kind: type[SmallNet] = SmallNet, *, dtype: torch.dtype | None = None, seed: int = 5, scale: float = 1.0
) -> Any:
    """Make a net whose weights are a seed's, and whose loss has a scale."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        net = kind().to(dtype or _dtype)
    net.scale = scale
    return net


def examples(count: int, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, always the same ones."""
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(count, width, generator=generator, dtype=torch.float64) for width in (INPUTS, OUTPUTS))
    return x.to(dtype or _dtype), y.to(dtype or _dtype)
