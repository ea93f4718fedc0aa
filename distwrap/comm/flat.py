"""A model's trained weights as one flat tensor, and back."""

from collections.abc import Sequence

import torch
from torch import nn

from distwrap._internals.torch import foreach


class FlatWeights:
    """Some parameters, read and written as one tensor.

    Args:
        parameters: of floating-point types, in the same order on every rank.

    Attributes:
        dtype: the type of that tensor: float32, or float64 where a parameter has it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        double = any(parameter.dtype == torch.float64 for parameter in self.parameters)
        self.dtype = torch.float64 if double else torch.float32

    def read(self) -> torch.Tensor:
        """Return a copy of the weights."""
        count = sum(parameter.numel() for parameter in self.parameters)
        flat = torch.empty(count, dtype=self.dtype, device=self.parameters[0].device)
        foreach("copy_", self._views(flat), [parameter.detach() for parameter in self.parameters])
        return flat

    def write(self, flat: torch.Tensor) -> None:
        """Set the weights."""
        foreach("copy_", [parameter.detach() for parameter in self.parameters], self._views(flat))

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = torch.split(flat, [parameter.numel() for parameter in self.parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self.parameters, strict=True)]


def trained(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters that training changes, each once."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def fragments(parameters: Sequence[nn.Parameter], count: int) -> list[FlatWeights]:
    """Cut a model into at most `count` runs of parameters of about the same size.

    Example:
        >>> parts = fragments([nn.Parameter(torch.zeros(n)) for n in (4, 1, 2, 1)], 2)
        >>> [[len(parameter) for parameter in part.parameters] for part in parts]
        [[4], [1, 2, 1]]
    """
    total = sum(parameter.numel() for parameter in parameters)
    runs: list[list[nn.Parameter]] = [[] for _ in range(count)]
    before = 0
    for parameter in parameters:
        middle = before + parameter.numel() / 2
        runs[min(count - 1, int(middle * count / max(1, total)))].append(parameter)
        before += parameter.numel()
    return [FlatWeights(run) for run in runs if run]
