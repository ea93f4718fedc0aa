"""The base class of precisions, and full precision, in which there is nothing to do."""

from typing import Any

import torch

from distwrap import protocols
from distwrap._internals.torch_tree import map_tensors


class Precision(protocols.Precision):
    __doc__ = protocols.Precision.__doc__

    def outputs(self, value: Any) -> Any:
        return map_tensors(_to_float32, value)


class FullPrecision(Precision):
    """Weights, inputs and outputs as they are."""

    is_plain = True

    def outputs(self, value: Any) -> Any:
        return value


def _to_float32(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
