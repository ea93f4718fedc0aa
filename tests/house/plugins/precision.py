"""A precision of another package."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distwrap.precision.precisions import Precision


class Double(Precision):
    """Weights, inputs and outputs in float64."""

    def weights(self, model: nn.Module) -> nn.Module:
        return model.double()

    def inputs(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self.inputs(each) for each in value)
        return value.double() if isinstance(value, torch.Tensor) else value

    def outputs(self, value: Any) -> Any:
        return value
