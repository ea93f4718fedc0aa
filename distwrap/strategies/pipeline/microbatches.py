"""Microbatches, and the weights of their losses in the loss of the batch."""

from __future__ import annotations

import math
from typing import Any

import torch

from distwrap._internals.torch_autograd import Number, divisors
from distwrap._internals.torch_tree import map_tensors, tensors_in

_ROUNDING = 1e-6


def batch_size(given: Any) -> int:
    """Return the length of the first tensor that has a dimension."""
    return next((len(tensor) for tensor in tensors_in(given) if tensor.dim()), 1)


def parts_of(given: Any, count: int) -> list[Any]:
    """Return the arguments of each microbatch: tensors as long as the batch are cut, others are passed whole."""
    if count == 1:
        return [given]
    batch = batch_size(given)
    size = batch // count

    def part(number: int) -> Any:
        piece = slice(number * size, (number + 1) * size)
        return map_tensors(lambda tensor: tensor[piece] if tensor.dim() and len(tensor) == batch else tensor, given)

    return [part(number) for number in range(count)]


class LossWeights:
    """Weights of the microbatches' losses in a batch's loss, which is their mean or sum.

    In a mean, the weight of a microbatch is the divisor of its loss, such as a count of words without padding. It is
    relative to the first microbatch, since later divisors are not known when its backward begins.

    Args:
        reduction: ``"mean"`` or ``"sum"``.
        count: the number of microbatches.

    Attributes:
        total: the sum of the weights, by which the weighted sum of the losses is divided at the end.
        unlike: whether these weights cannot give the loss of the batch.
    """

    def __init__(self, reduction: str, count: int) -> None:
        self._is_sum, self._share = reduction == "sum", 1.0 if reduction == "sum" else 1 / count
        self._first: list[Number] = []
        self.total: Number = 0.0
        self.unlike: bool | torch.Tensor = False

    def of(self, loss: torch.Tensor) -> Any:
        """Return the weight of the next microbatch's loss."""
        wide = torch.promote_types(loss.dtype, torch.float32)
        found = [each.detach().to(wide) if isinstance(each, torch.Tensor) else each for each in divisors(loss)]
        self._first = self._first or found
        if len(found) != len(self._first):
            self.unlike, found = True, self._first
        ratios = [_ratio(mine, its) for mine, its in zip(found, self._first, strict=True)]
        ratio: Any = 1.0 if self._is_sum else ratios[0]
        for each in ratios:
            alike = (abs(each - ratio) <= _ROUNDING) & (each > 0)  # false if there is nothing to count
            self.unlike = self.unlike | (not alike if isinstance(alike, bool) else ~alike)
        weight = ratio * self._share
        self.total = 1.0 if self._is_sum else self.total + weight
        return weight


def _ratio(mine: Number, its: Number) -> Number:
    if isinstance(its, torch.Tensor) and not isinstance(mine, torch.Tensor):
        mine = torch.full_like(its, mine)
    return mine / its if isinstance(its, torch.Tensor) or its else math.nan
