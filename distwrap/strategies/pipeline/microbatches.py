"""The microbatches into which the arguments of a method are cut."""

from __future__ import annotations

from typing import Any

from distwrap._internals.torch_tree import map_tensors, tensors_in


def batch_size(given: Any) -> int:
    """Return the length of the first tensor that has one, among arguments in any nesting."""
    return next((len(tensor) for tensor in tensors_in(given) if tensor.dim()), 1)


def parts_of(given: Any, count: int) -> list[Any]:
    """Return the arguments of each microbatch: tensors as long as the batch are cut, others go to all of them."""
    if count == 1:
        return [given]
    batch = batch_size(given)
    size = batch // count

    def part(number: int) -> Any:
        piece = slice(number * size, (number + 1) * size)
        return map_tensors(lambda tensor: tensor[piece] if tensor.dim() and len(tensor) == batch else tensor, given)

    return [part(number) for number in range(count)]
