"""Functions of torch while a stranger's file is read: none goes through more numbers than the file can hold.

A tensor with a stride of 0 looks large and takes no memory, until a function copies it, or Python makes an object of
each of its rows.

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
_COPIES = 4  # of a file's numbers that are honest: on the CPU, on the device, in the other order of bytes, quantized
_SMALL = 16_000_000  # bytes
_WIDEST = 16  # bytes of a number, where a call does not say its type


class Bounded(TorchFunctionMode):
    """Context in which functions are refused that would go through more bytes than a file has.

    Args:
        length: bytes of the file.
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
    """Return how many numbers a tensor would have that is made of a size, if this is one."""
    is_size = isinstance(argument, (list, tuple)) and argument and all(isinstance(length, int) for length in argument)
    return prod(argument) if is_size else 0


def _held(argument: Any) -> int:
    """Return how many bytes a function goes through that is given this, if it is a tensor."""
    if not isinstance(argument, torch.Tensor) or argument.is_meta or argument.layout is not torch.strided:
        return 0  # a sparse one's numbers are looked at where it is made of them
    return argument.numel() * argument.element_size()


def _parts(arguments: Iterable[Any]) -> Iterator[Any]:
    for argument in arguments:
        yield argument
        if isinstance(argument, (list, tuple)):
            yield from argument
