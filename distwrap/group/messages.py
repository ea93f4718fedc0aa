"""Messages of all ranks to all, by which they also see that they are in the same call."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from distwrap.errors import CollectiveError
from distwrap.group.signing import run_secret, sign, verify
from distwrap.group.tensor_exchange import exchange_device
from distwrap.group.tensors_apart import bytes_of
from distwrap.supervision.order_check import SAME_CALLS

_gather_into: Any = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # its name before torch 2.13


def of_every_rank(value: Any, problem: str, call: str = "gather_object()") -> list[Any]:
    """Return every rank's value; raise the problem of any rank, or that they are in different calls, on every rank.

    Args:
        value: this rank's.
        problem: why this rank cannot go on; empty where it can.
        call: the collective, with what all ranks must give it alike.
    """
    secret = run_secret()
    mine = tensor_of(sign((call, problem, None), secret) if problem else _signed(call, value, secret))
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=mine.device)
    _gather_into(sizes, torch.tensor([mine.numel()], device=mine.device))
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=mine.device)
    padded[: mine.numel()] = mine
    received = torch.empty(len(sizes) * longest, dtype=torch.uint8, device=mine.device)
    _gather_into(received, padded)
    data = bytes_of(received.cpu())
    messages = [
        verify(data[rank * longest : rank * longest + size], secret, rank) for rank, size in enumerate(sizes.tolist())
    ]
    for rank, (_, problem, _) in enumerate(messages):
        if problem:
            raise CollectiveError(f"rank {rank}: {problem}")
    for rank, (other, _, _) in enumerate(messages):
        if other != messages[0][0]:
            raise CollectiveError(f"rank 0 calls {messages[0][0]} where rank {rank} calls {other}. {SAME_CALLS}")
    return [value for *_, value in messages]


def _signed(call: str, value: Any, secret: bytes) -> bytes:
    """Return the message with a value, or with why it cannot be sent: all ranks raise then, and none waits for it."""
    try:
        return sign((call, "", value), secret)
    except Exception as error:  # noqa: BLE001 - whatever it is, the others must hear of it
        return sign((call, cannot_be_sent(value, error), None), secret)


def cannot_be_sent(value: Any, error: Exception) -> str:
    """Return what is said of a value that cannot be pickled."""
    return f"its {type(value).__qualname__} cannot be sent to the other ranks: {type(error).__name__}: {error}"


def tensor_of(data: bytes) -> torch.Tensor:
    """Return bytes as a tensor that the ranks can exchange."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(exchange_device())
