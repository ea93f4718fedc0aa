"""What an algorithm of exchange is: options that travel to the ranks, and what it becomes there for one model.

```
Algorithm                what the user names: a frozen dataclass of options
├── GradientAlgorithm    makes an Averager, which a DDP hook feeds with buckets of gradients
└── WeightAlgorithm      makes a WeightExchange, which acts around the optimizer's steps
```
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

if TYPE_CHECKING:
    from distwrap.group.world import World
    from distwrap.model.distributed import DistributedModel


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """How the ranks exchange what they have learnt. Subclasses are frozen dataclasses of their options.

    Attributes:
        hierarchical: full precision inside a node, the algorithm between the nodes' first ranks.
        same_weights: whether all ranks hold the same weights after each step.
    """

    hierarchical: bool = False
    same_weights: ClassVar[bool] = True

    def check(self, world_size: int) -> None:  # noqa: B027 - most have nothing to refuse
        """Refuse options that do not fit a world of so many ranks, or of so many nodes where hierarchical.

        Raises:
            OptionError: they do not.
        """

    @abstractmethod
    def attach(self, model: DistributedModel, world: World) -> Any:
        """Begin to exchange for a model that was wrapped just now; every rank calls it. Returns the `Exchange`."""


@dataclass
class Bucket:
    """Some gradients of one backward, one after the other in one flat tensor; or the like.

    Attributes:
        values: what is to be averaged, in place.
        parameters: whose gradients they are, in order.
        views: the values of each parameter, in its shape and memory format.
        scale: by which they are multiplied, under fp16.
        name_of: a parameter's name by its id.
        report: called with the names of parameters whose gradients are not finite.
    """

    values: torch.Tensor
    parameters: list[nn.Parameter]
    views: list[torch.Tensor] = field(default_factory=list)
    scale: float = 1.0
    name_of: dict[int, str] = field(default_factory=dict)
    report: Callable[[list[str]], None] | None = None

    @property
    def key(self) -> tuple[int, ...]:
        """By which the bucket is known from step to step. DDP rearranges its buckets after the first."""
        return tuple(map(id, self.parameters))

    def parts(self, flat: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Cut a flat tensor, by default the values, into the parameters' shares."""
        flat = self.values if flat is None else flat
        return list(torch.split(flat, [parameter.numel() for parameter in self.parameters]))

    def complain(self) -> None:
        """Say whose gradients are not finite; call it before they are overwritten."""
        if self.report is not None:
            pairs = zip(self.parameters, self.parts(), strict=True)
            bad = [parameter for parameter, part in pairs if not torch.isfinite(part).all()]
            self.report([self.name_of.get(id(parameter), "a parameter") for parameter in bad])


class Averager(ABC):
    """Averages gradients over the ranks of a link: the part of a gradient algorithm that has state.

    Attributes:
        wants_scale: whether it keeps something from step to step, which must follow the scale of fp16.
    """

    wants_scale = False

    @abstractmethod
    def average(self, bucket: Bucket) -> None:
        """Replace the bucket's values by their mean over the ranks. Runs in the model's thread, in order.

        Numbers that are not finite stay so on all ranks, and are reported by `Bucket.complain`.
        """
