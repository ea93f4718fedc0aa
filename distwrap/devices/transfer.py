"""Copies of tensors, in any nesting, on a device, and of a loader's batches a step ahead."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from distwrap._internals.torch_tree import tree_leaves, tree_map
from distwrap.devices.kinds import kind_of


def to_device(value: Any, device: torch.device) -> Any:
    """Move the tensors in any nesting to a device; costs nothing on the CPU."""
    if device.type == "cpu":
        return value
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf, value)


def on_device(batches: Iterable[Any], device: torch.device, ahead: bool) -> Iterator[Any]:
    """Yield the batches on a device.

    Args:
        batches: from a loader.
        device: where the step computes.
        ahead: copy each batch while the step before still computes, on a stream of its own. That overlaps where
            the batch is in pinned memory (``pin_memory=True``).

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams
    """
    streams = kind_of(device).streams()
    if not ahead or streams is None:
        for batch in batches:
            yield to_device(batch, device)
        return
    side = streams.Stream(device)
    copied: list[Any] = []
    for batch in batches:
        with streams.stream(side):
            copied.append(to_device(batch, device))
        if len(copied) > 1:
            yield _handed_over(copied.pop(0), streams.current_stream(device), side)
    for batch in copied:
        yield _handed_over(batch, streams.current_stream(device), side)


def _handed_over(batch: Any, current: torch.Stream, side: torch.Stream) -> Any:
    """Let the step's stream wait for the copy, and keep the memory until that stream is done with it."""
    current.wait_stream(side)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            leaf.record_stream(current)
    return batch
