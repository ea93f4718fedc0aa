"""What strategies of the tests put around the user's model."""

from __future__ import annotations

from typing import Any

from torch import nn

from distwrap.model import TransparentModule


class Copy(TransparentModule):
    """The user's model, whose gradients nobody averages but the strategy."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


class Around(nn.Module):
    """A module that knows nothing of distwrap."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *args: Any) -> Any:
        return self.net(*args)
