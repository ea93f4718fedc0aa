"""Pickles whose tensors come out on the device of the rank that reads them.

A tensor's own pickle names the device of the rank that sent it: all ranks would put its numbers there.
"""

import io
import pickle
from typing import Any

import torch

from distwrap.group.world import current_world


def dumps(value: Any) -> bytes:
    """Pickle an object. Tensors of an accelerator come out on the accelerator of whoever unpickles them.

    Those of a class of their own come out on the CPU.

    Example:
        >>> pickle.loads(dumps([torch.ones(1)]))
        [tensor([1.])]
    """
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def arrived(tensor: torch.Tensor, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    """Return a tensor of another rank's accelerator on this rank's own."""
    own = tensor.to(current_world().device)
    return torch.nn.Parameter(own, requires_grad) if is_parameter else own.requires_grad_(requires_grad)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor) or obj.device.type in ("cpu", "meta") or hasattr(obj, "full_tensor"):
            return NotImplemented
        if type(obj) not in (torch.Tensor, torch.nn.Parameter):  # of a class of its own, which may not know `to`
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        return arrived, (obj.detach().cpu(), obj.requires_grad, type(obj) is torch.nn.Parameter)
