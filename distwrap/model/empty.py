"""Models without numbers, which are made on the meta device and get their numbers where they are divided.

Source: https://docs.pytorch.org/docs/stable/meta.html
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn

from distwrap._internals.torch_sharding import is_saved, reset_of
from distwrap.errors import ModelError

Copy = Callable[[torch.Tensor, torch.Tensor], object]


def init_empty() -> AbstractContextManager[object]:
    """Make models without numbers inside of a ``with``, which take no memory, as those larger than one process.

    `wrap_model` divides such a model, and then lets its modules draw their numbers by their ``reset_parameters()``,
    each rank for its own share. They are not those that the model would have had without this.

    Example:
        >>> with init_empty():
        ...     model = nn.Linear(10**6, 10**6)
        >>> model.weight.device
        device(type='meta')
    """
    return torch.device("meta")


def fill(net: nn.Module, device: torch.device, seed: int, copy: Copy | None = None) -> None:
    """Give a model that was made without numbers its numbers, one module at a time.

    Args:
        net: the model, whose parameters may be divided.
        device: to put it on.
        seed: of the numbers, the same on all ranks.
        copy: fills a parameter, whatever part of it is here, from the whole tensor; by default in place.

    Raises:
        ModelError: names a module with weights or buffers that has no ``reset_parameters()``.
    """
    parts = [(name, part) for name, part in net.named_modules() if any(tensor.is_meta for tensor in _own(part))]
    for name, part in parts:
        if reset_of(part) is None:
            raise ModelError(
                f"{type(net).__name__} was made without numbers, and {name or 'the model itself'!r} has no "
                f"reset_parameters() to draw them. Give its class one, which fills its parameters and buffers in place."
            )
    kept = [
        (part, name, value)
        for part in net.modules()
        for name, value in part.named_buffers(recurse=False)
        if not value.is_meta
    ]
    tied: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in net.modules():
        for name, parameter in part.named_parameters(recurse=False):
            tied.setdefault(id(parameter), []).append((part, name))
    net.to_empty(device=device)
    for (first, own), *others in tied.values():  # each place has got a parameter of its own
        for part, name in others:
            setattr(part, name, getattr(first, own))
    for part, name, value in kept:
        part.register_buffer(name, value.to(device), is_saved(part, name))
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]), torch.no_grad():
        torch.manual_seed(seed)
        for _, part in reversed(parts):  # what is inside of others first, as constructors do
            _draw(part, device, copy or (lambda parameter, whole: parameter.copy_(whole)))


def _draw(part: nn.Module, device: torch.device, copy: Copy) -> None:
    """Let a module draw whole tensors, and fill its parameters from them."""
    reset = reset_of(part)
    assert reset is not None
    own = dict(part.named_parameters(recurse=False))
    whole = {
        name: nn.Parameter(torch.empty(value.shape, dtype=value.dtype, device=device), value.requires_grad)
        for name, value in own.items()
    }
    try:
        for name, value in whole.items():
            setattr(part, name, value)
        reset()
    finally:
        for name, value in own.items():
            drawn = getattr(part, name)
            setattr(part, name, value)
            copy(value, drawn.detach())


def _own(part: nn.Module) -> list[torch.Tensor]:
    return [*part.parameters(recurse=False), *part.buffers(recurse=False)]
