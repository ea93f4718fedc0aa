"""Size of the activations that a forward keeps for its backward, measured on the meta device without computing.

Source: https://docs.pytorch.org/docs/stable/autograd.html#saved-tensors-hooks
"""

import re

import torch
from torch import nn

from distwrap.errors import OptionError


def activation_bytes(model: nn.Module, inputs: list[torch.Tensor]) -> int:
    """Return the bytes that a forward keeps for its backward, without parameters, buffers and inputs.

    Args:
        model: a model on the meta device.
        inputs: a batch on the meta device.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> activation_bytes(model, [input_of("16x4")])
        512
    """
    known = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers(), *inputs)]
    ignored = {id(storage) for storage in known}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in ignored:
            kept[id(storage)] = storage  # kept alive, so that no other storage gets its id
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(*inputs)
    return sum(storage.nbytes() for storage in kept.values())


def input_of(text: str) -> torch.Tensor:
    """Return an input without numbers for a text with a shape and a type, as ``"32x128:int64"``.

    Raises:
        OptionError: the text is not a shape with a type.
    """
    shape, _, kind = text.partition(":")
    dtype = getattr(torch, kind or "float32", None)
    if not re.fullmatch(r"\d+(x\d+)*", shape) or not isinstance(dtype, torch.dtype):
        raise OptionError(f"--batch {text}: it is a shape with the batch first, as 32x3x224x224 or 32x128:int64.")
    return torch.empty([int(size) for size in shape.split("x")], dtype=dtype, device="meta")
