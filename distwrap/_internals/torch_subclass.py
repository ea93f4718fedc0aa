"""Private names of torch for a tensor subclass without numbers.

Every function says which names it relies on, and what happens without them; all were seen in version 2.13.
"""

from typing import TypeVar

import torch

_Sub = TypeVar("_Sub", bound=torch.Tensor)


def wrapper_tensor(kind: type[_Sub], like: torch.Tensor, device: torch.device) -> _Sub:
    """Make a tensor of a subclass with the size and type of another, a device, and no memory.

    Relies on ``torch:Tensor()._make_wrapper_subclass``.
    Without it: strategy="deepspeed" cannot be used.
    """
    made: _Sub = torch.Tensor._make_wrapper_subclass(
        kind, like.size(), strides=like.stride(), dtype=like.dtype, device=device
    )
    return made
