"""Nets and data of the behaviours: blocks that any strategy can divide, in widths that 2, 3 and 4 ranks divide."""

from typing import Any

import torch
from torch import nn

from distwrap.testing.exactness import exact_type

INPUTS, WIDTH, OUTPUTS, BLOCKS = 6, 12, 3, 4
ROWS = 8  # of a share's batch


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

    def describe(self) -> str:
        """Return a few words on the net, without a forward."""
        return f"{len(self.blocks)} blocks, scale {self.scale}"


def small(
    kind: type[SmallNet] = SmallNet, *, dtype: torch.dtype | None = None, seed: int = 5, scale: float = 1.0
) -> Any:
    """Make a net whose weights are a seed's, and whose loss has a scale."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        net = kind().to(dtype or exact_type())
    finally:
        torch.set_rng_state(state)
    net.scale = scale
    return net


def examples(count: int, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, always the same ones."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, INPUTS, generator=generator, dtype=torch.float64)
    y = torch.randn(count, OUTPUTS, generator=generator, dtype=torch.float64)
    return x.to(dtype or exact_type()), y.to(dtype or exact_type())
