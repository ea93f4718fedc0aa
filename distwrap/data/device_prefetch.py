"""Batches on the rank's device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from distwrap.devices.transfer import to_device


def on_device(batches: Iterable[Any], device: torch.device, ahead: bool) -> Iterator[Any]:
    """Yield the batches on a device.

    Args:
        batches: from a loader.
        device: where the step computes.
        ahead: copy each batch while the step before still computes, on a CUDA stream of its own. That overlaps where
            the batch is in pinned memory (``pin_memory=True``).

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams
    """
    if not ahead or device.type != "cuda":
        for batch in batches:
            yield to_device(batch, device)
        return
    side: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    copied: list[Any] = []
    for batch in batches:
        with torch.cuda.stream(side):
            copied.append(to_device(batch, device))
        if len(copied) > 1:
            yield _taken_over(copied.pop(0), side, device)
    for batch in copied:
        yield _taken_over(batch, side, device)


def _taken_over(batch: Any, side: torch.cuda.Stream, device: torch.device) -> Any:
    """Let the step's stream wait for the copy, and keep the memory until that stream is done with it."""
    current = torch.cuda.current_stream(device)
    current.wait_stream(side)
    tree_map_only(torch.Tensor, lambda leaf: leaf.record_stream(current), batch)
    return batch
