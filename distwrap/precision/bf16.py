"""bfloat16: under autocast, or with the weights in it too.

Source: https://docs.pytorch.org/docs/stable/amp.html
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from distwrap._internals.torch_tree import map_tensors
from distwrap.precision.base import Precision


class MixedBF16(Precision):
    """Weights in float32, a forward under autocast to bfloat16."""

    def context(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16)


class TrueBF16(Precision):
    """Weights and inputs in bfloat16."""

    def weights(self, model: nn.Module) -> nn.Module:
        return model.to(torch.bfloat16)

    def inputs(self, value: Any) -> Any:
        return map_tensors(_to_bfloat16, value)


def _to_bfloat16(value: torch.Tensor) -> torch.Tensor:
    return value.bfloat16() if value.is_floating_point() else value
