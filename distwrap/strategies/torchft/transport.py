"""Signed transfer of the training state to a rank that has come back, through the members' process group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distwrap.group.signing import sign, verify
from distwrap.group.tensor_exchange import exchange_device
from distwrap.group.tensors_apart import as_bytes, bytes_of, put_together, take_apart


class GroupTransport:
    """torchft's ``CheckpointTransport`` between ranks of one process group.

    Args:
        secret: the secret of the run.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def metadata(self) -> str:
        """Return an empty text, as the receiver need not find the sender."""
        return ""

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Send a state to other members."""
        data, tensors = take_apart(state_dict)
        described = [(each.dtype, each.shape) for each in tensors]
        message = torch.frombuffer(bytearray(sign((data, described), self._secret)), dtype=torch.uint8)
        for rank in dst_ranks:
            dist.send(torch.tensor([message.numel()]), rank)
            dist.send(message, rank)
            for tensor in filter(torch.Tensor.numel, tensors):
                plain = tensor.detach().to(exchange_device()).resolve_conj().resolve_neg().contiguous()
                dist.send(as_bytes(plain), rank)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Receive a state from another member, with tensors on the CPU."""
        size = torch.tensor([0])
        dist.recv(size, src_rank)
        message = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(message, src_rank)
        data, described = verify(bytes_of(message), self._secret, src_rank)
        tensors = []
        for dtype, shape in described:
            tensor = torch.empty(shape, dtype=dtype)
            if tensor.numel():
                dist.recv(as_bytes(tensor), src_rank)
            tensors.append(tensor)
        return put_together(data, tensors)

    def disallow_checkpoint(self) -> None:
        """Do nothing, since a state is sent at once."""

    def shutdown(self, wait: bool = True) -> None:
        """Do nothing, since nothing is held."""
