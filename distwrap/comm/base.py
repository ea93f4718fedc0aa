"""Base classes of exchange algorithms: their options, and their work on a rank for one model.

```
Algorithm                a frozen dataclass of options, which the user names
├── GradientAlgorithm    makes an Averager, which gets DDP's buckets of gradients
└── WeightAlgorithm      makes a WeightExchange, which acts around the optimizer's steps
```
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from distwrap.protocols import Algorithm as Algorithm

T = TypeVar("T")


def option(default: T, check: Callable[[str, Any], Any]) -> T:
    """Declare an option of an algorithm, and the check that its values pass.

    Args:
        default: the value if the user gives none.
        check: takes the name and a value, and returns the value or raises OptionError.
    """
    return field(default=default, metadata={"check": check})


@dataclass
class Bucket:
    """Flat tensor of numbers to average, parameter by parameter; usually gradients of one backward.

    Attributes:
        values: the numbers, which are averaged in place.
        parameters: the parameters of the numbers, in order.
        views: the numbers of each parameter, in its shape and memory format.
        scale: the factor by which fp16 has multiplied the numbers.
        name_of: the parameters' names by their ids.
        report: takes the names of parameters whose gradients are not finite.
    """

    values: torch.Tensor
    parameters: list[nn.Parameter]
    views: list[torch.Tensor] = field(default_factory=list)
    scale: float = 1.0
    name_of: dict[int, str] = field(default_factory=dict)
    report: Callable[[list[str]], None] | None = None

    @property
    def key(self) -> tuple[int, ...]:
        """The ids of the parameters, which identify the bucket; DDP rearranges buckets after the first step."""
        return tuple(map(id, self.parameters))

    def parts(self, flat: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Return the parts of a flat tensor by parameter, by default of the values; complex numbers count twice."""
        flat = self.values if flat is None else flat
        return list(torch.split(flat, [(1 + each.is_complex()) * each.numel() for each in self.parameters]))

    def complain(self) -> None:
        """Report the parameters with gradients that are not finite; call it before they are overwritten."""
        if self.report is not None:
            pairs = zip(self.parameters, self.parts(), strict=True)
            bad = [parameter for parameter, part in pairs if not torch.isfinite(part).all()]
            self.report([self.name_of.get(id(parameter), "a parameter") for parameter in bad])


class Averager(ABC):
    """Mean of gradients over the ranks of a link; holds the state of a gradient algorithm.

    Attributes:
        wants_scale: whether it keeps numbers from step to step, which must follow the scale of fp16.
    """

    wants_scale = False

    @abstractmethod
    def average(self, bucket: Bucket) -> None:
        """Replace the bucket's values by their mean over the ranks. Runs in the model's thread, in order.

        Numbers that are not finite stay so on all ranks, and `Bucket.complain` reports them.
        """
