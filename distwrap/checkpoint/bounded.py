"""Limit torch's functions while an untrusted file is read to the amount of numbers that the file can hold.

A tensor with a stride of 0 looks large and takes no memory, until a function copies it or Python makes an object of
each row.

Source: https://docs.pytorch.org/docs/stable/notes/extending.html#extending-all-torch-api-with-modes
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from distwrap.errors import CheckpointError

_WITHOUT_MEMORY = {
    *("set_", "as_strided", "detach", "requires_grad_", "_conj", "_neg_view", "_make_subclass"),
    *("__get__", "__set__", "numel", "dim", "size", "stride"),
}
_COPIES = 4  # copies of honest numbers: on the CPU, on the device, with swapped bytes, quantized
_SMALL = 16_000_000  # bytes
_WIDEST = 16  # bytes of a number if a call does not say its type


class Bounded(TorchFunctionMode):
    """Context that refuses functions which would process more bytes than a file has.

    Args:
        length: the size of the file in bytes.
        path: the file, for the error.
    """

    def __init__(self, length: int, path: Path) -> None:
        super().__init__()
        self._limit, self._path, self._used = _COPIES * length + _SMALL, path, 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        if name not in _WITHOUT_MEMORY and torch.device(kwargs.get("device") or "cpu").type != "meta":
            given = (*args, *kwargs.values())
            width = next((each.itemsize for each in given if isinstance(each, torch.dtype)), _WIDEST)
            is_empty = "sparse" in name or name == "_make_wrapper_subclass"
            made = 0 if is_empty else width * max(map(_count, args), default=0)
            self._used += max([made, *map(_held, _parts(given))])
            if name == "unbind" or self._used > self._limit:
                raise CheckpointError(
                    f"cannot load {self._path}: {name}() would make more of its numbers than it holds. It is "
                    "damaged, or was made to fill the memory."
                )
        return func(*args, **kwargs)


def _count(argument: Any) -> int:
    """Return how many numbers a tensor of this size would have; 0 if the argument is not a size."""
    is_size = isinstance(argument, (list, tuple)) and argument and all(isinstance(length, int) for length in argument)
    return prod(argument) if is_size else 0


def _held(argument: Any) -> int:
    """Return how many bytes a function processes for this argument; 0 if it is not a tensor."""
    if not isinstance(argument, torch.Tensor) or argument.is_meta or argument.layout is not torch.strided:
        return 0  # the numbers of a sparse tensor are counted when it is made
    return argument.numel() * argument.element_size()


def _parts(arguments: Iterable[Any]) -> Iterator[Any]:
    for argument in arguments:
        yield argument
        if isinstance(argument, (list, tuple)):
            yield from argument
