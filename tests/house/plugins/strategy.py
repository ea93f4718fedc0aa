"""A strategy of another package."""

from __future__ import annotations

from torch import nn

from distwrap import DDPStrategy
from distwrap.group.world import World
from distwrap.strategies import Wrapping


class Frozen(DDPStrategy):
    """DDP that trains no biases."""

    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.endswith("bias"))
        return super().prepare_model(model, world, wrapping)
