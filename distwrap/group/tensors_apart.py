"""Objects pickled with their tensors apart, which then travel by themselves, wherever in an object they are."""

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is no more than its numbers in rows; a sparse or a quantised one consists of others.

    Example:
        >>> is_dense(torch.eye(2)), is_dense(torch.eye(2).to_sparse())
        (True, False)
    """
    plain = tensor.layout is torch.strided and tensor.device.type != "meta"
    return plain and not tensor.is_quantized and not tensor.is_nested


def take_apart(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return an object as bytes, and the tensors in it; of a sparse tensor, those that it consists of."""
    file = io.BytesIO()
    pickler = _TensorPickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.dump(value)
    return file.getvalue(), pickler.tensors


def put_together(data: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the object of which `take_apart` made these bytes and tensors.

    Example:
        >>> put_together(*take_apart({"lr": 0.1, "w": torch.ones(1)}))
        {'lr': 0.1, 'w': tensor([1.])}
    """
    unpickler = _TensorUnpickler(io.BytesIO(data))
    unpickler.tensors = tensors
    return unpickler.load()


class _TensorPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not torch.Tensor or not is_dense(obj):
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]


class _TensorUnpickler(pickle.Unpickler):
    tensors: Sequence[torch.Tensor] = ()

    def persistent_load(self, pid: Any) -> Any:
        return self.tensors[pid]
