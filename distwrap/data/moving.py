"""A batch on the rank's device, for loops over something else than a sharded loader."""

from typing import TypeVar

import torch

from distwrap.devices import transfer
from distwrap.group.world import current_world

Batch = TypeVar("Batch")


def to_device(batch: Batch, device: torch.device | str | None = None) -> Batch:
    """Return a batch on this rank's device; on the CPU, the batch itself.

    A loader from `shard_loader` already gives its batches on the device, and a wrapped model moves its inputs there.

    Args:
        batch: tensors in any nesting of lists, dicts, dataclasses and plain objects, which are copied. An object with a
            ``to()`` method, as a ``PackedSequence``, moves itself.
        device: a device other than the rank's.

    Example:
        >>> to_device({"x": torch.ones(2), "name": "first"})
        {'x': tensor([1., 1.]), 'name': 'first'}
    """
    moved: Batch = transfer.to_device(batch, current_world().device if device is None else torch.device(device))
    return moved
