"""Copies of tensors, in any nesting, on a device."""

from typing import Any

import torch

from distwrap._internals.torch_tree import tree_map


def to_device(value: Any, device: torch.device) -> Any:
    """Move the tensors in any nesting to a device; costs nothing on the CPU."""
    if device.type == "cpu":
        return value
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf, value)
