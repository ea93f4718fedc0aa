"""Objects pickled with their tensors apart, which then travel by themselves, wherever in an object they are.

Plain data is pickled so that its pickle names nothing but a few types, whoever has made it: nothing in it is called.
"""

import builtins
import io
import math
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from distwrap._internals.python import unpickler
from distwrap.group.own_device import arrived

# Types of plain data that a pickle has to name, by module and name: to call one makes a value, and does nothing else.
_NAMED = {
    *(("collections", name) for name in ("OrderedDict", "Counter", "defaultdict", "deque")),
    *(("builtins", name) for name in ("complex", "slice", "range", "int", "float", "list", "dict", "set")),
    *(("datetime", name) for name in ("date", "time", "datetime", "timedelta", "timezone")),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
    *(("torch", name) for name in ("Size", "device")),
    ("torch.nn.parameter", "Parameter"),
}
_NUMBERS = "biufcmMSU"  # numpy's kinds of arrays that are no more than their bytes


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is no more than its numbers in rows; a sparse or a quantised one consists of others.

    Example:
        >>> is_dense(torch.eye(2)), is_dense(torch.eye(2).to_sparse())
        (True, False)
    """
    plain = tensor.layout is torch.strided and tensor.device.type != "meta"
    return plain and not tensor.is_quantized and not tensor.is_nested


def take_apart(value: Any, *, plain: bool = False) -> tuple[bytes, list[torch.Tensor]]:
    """Return an object as bytes, and the tensors in it; of a sparse tensor, those that it consists of.

    Args:
        value: the object.
        plain: refuse what is no plain data.

    Raises:
        TypeError: it is no plain data; names the type.
    """
    file = io.BytesIO()
    pickler = (_PlainPickler if plain else _TensorPickler)(file, pickle.HIGHEST_PROTOCOL)
    pickler.dump(value)
    return file.getvalue(), pickler.tensors


def put_together(data: bytes, tensors: Sequence[torch.Tensor], *, plain: bool = False) -> Any:
    """Return the object of which `take_apart` made these bytes and tensors.

    Example:
        >>> put_together(*take_apart({"lr": 0.1, "w": torch.ones(1)}))
        {'lr': 0.1, 'w': tensor([1.])}
    """
    unpickler = (_PlainUnpickler if plain else _TensorUnpickler)(io.BytesIO(data))
    unpickler.tensors = tensors
    return unpickler.load()


def dump_plain(value: Any) -> bytes:
    """Return plain data, with its tensors, as bytes.

    Raises:
        TypeError: it is no plain data; names the type.
    """
    data, tensors = take_apart(value, plain=True)
    described = [
        (each.dtype, each.shape, each.requires_grad, each.device.type != "cpu", bytes_of(each)) for each in tensors
    ]
    return take_apart((data, described), plain=True)[0]


def load_plain(data: bytes) -> Any:
    """Return the plain data of which `dump_plain` made these bytes; tensors of an accelerator on this rank's own.

    Example:
        >>> load_plain(dump_plain({"loss": 0.5, "shape": torch.Size([2])}))
        {'loss': 0.5, 'shape': torch.Size([2])}
    """
    data, described = put_together(data, [], plain=True)
    tensors = []
    for dtype, shape, wants_gradient, was_on_accelerator, raw in described:
        flat = torch.frombuffer(bytearray(raw), dtype=dtype) if math.prod(shape) else torch.empty(0, dtype=dtype)
        own = flat.reshape(shape)
        tensors.append(
            arrived(own, wants_gradient, False) if was_on_accelerator else own.requires_grad_(wants_gradient)
        )
    return put_together(data, tensors, plain=True)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, in the same memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # one number may have any stride


def of_bytes(data: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return the tensor of which `as_bytes` has made this, in the same memory."""
    return data.view(dtype).view(*shape) if shape else data.view(dtype)[0]


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return a copy of a tensor's bytes."""
    plain = as_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())
    data = bytearray(plain.numel())
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(plain)
    return bytes(data)


class _TensorPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
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


class _PlainPickler(_TensorPickler):
    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if kind.__module__ == "numpy" and getattr(getattr(obj, "dtype", None), "kind", "") in _NUMBERS:
            is_array = kind.__name__ in ("ndarray", "memmap")
            if is_array or obj.ndim == 0:  # a matrix is something else
                order = "F" if obj.flags.fnc else "C"
                return obj.dtype.str, obj.shape, is_array, order, obj.tobytes(order)
        return super().persistent_id(obj)

    def reducer_override(self, obj: Any) -> Any:
        kind = obj if isinstance(obj, type) else type(obj)
        if kind is torch.nn.Parameter and obj is not kind:
            return kind, (obj.data, obj.requires_grad)
        if kind is torch.dtype or _is_named(kind.__module__, kind.__qualname__):
            return NotImplemented
        what = f"{'the class' if obj is kind else 'a'} {kind.__module__}.{kind.__qualname__}"
        raise TypeError(
            f"{what} is not plain data (numbers, texts, bytes, dates, paths, dense tensors, arrays of numbers, "
            "in lists, tuples, dicts, sets), and these ranks share no secret by which they could know that an "
            "object is safe to unpickle. Set DISTWRAP_SECRET_FILE for all of them to a file with the same "
            "secret (see docs/explanation/security.md), or DISTWRAP_TRUST_NETWORK=1 where nobody else can "
            "reach them; or send its parts, as plain data"
        )


def _is_named(module: str, name: str) -> bool:
    """Return whether plain data may name it: one of those types, an exception of Python's own, or a dtype."""
    found = getattr({"builtins": builtins, "torch": torch}.get(module), name, None)
    is_error = isinstance(found, type) and issubclass(found, Exception)
    return (module, name) in _NAMED or (module == "builtins" and is_error) or isinstance(found, torch.dtype)


class _PlainUnpickler(unpickler()):  # type: ignore[misc]
    tensors: Sequence[torch.Tensor] = ()

    def find_class(self, module: str, name: str) -> Any:
        if not _is_named(module, name):
            raise pickle.UnpicklingError(f"{module}.{name} is not plain data, and these ranks share no secret")
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        if not isinstance(pid, tuple):
            return self.tensors[pid]
        import numpy  # torch itself can do without

        kind, shape, is_array, order, raw = pid
        if numpy.dtype(kind).kind not in _NUMBERS:
            raise pickle.UnpicklingError(f"an array of {kind!r} is not plain data")
        array = numpy.frombuffer(bytearray(raw), dtype=kind).reshape(shape, order=order)
        return array if is_array else array[()]

    def load_build(self) -> None:
        """Fill an object; a class would be changed for the whole process."""
        if isinstance(changed := self.stack[-2], type):
            raise pickle.UnpicklingError(f"it would change the class {changed.__qualname__}")
        super().load_build()

    dispatch = {**getattr(unpickler(), "dispatch", {}), pickle.BUILD[0]: load_build}
